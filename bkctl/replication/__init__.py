"""Auto-recovery and moves: find missing replicas, copy entries to other bookies, swap the bookies in the metadata."""
