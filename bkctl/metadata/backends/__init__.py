"""The metadata stores: ZooKeeper, etcd, SQLite."""
