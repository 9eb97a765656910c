"""Administration of a cluster's metadata: check, dump, health, undo, removal."""
