"""The jobs of `bkctl pipeline`."""
