"""The metadata store on HBase: ledgers in a table, all else in HBase's ZooKeeper."""
