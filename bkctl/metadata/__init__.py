"""Metadata stores (ZooKeeper, SQLite) and what a cluster keeps in them."""
