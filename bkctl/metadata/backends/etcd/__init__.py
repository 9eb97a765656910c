"""The metadata store on etcd."""
