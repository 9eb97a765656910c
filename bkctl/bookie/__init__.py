"""The bookie server, and the local cluster of them."""
