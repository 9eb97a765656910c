"""The REST API: on a bookie, and as a gateway for a cluster."""
