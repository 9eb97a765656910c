"""Metadata stores (ZooKeeper, etcd, HBase, SQLite) and what a cluster keeps in them."""
