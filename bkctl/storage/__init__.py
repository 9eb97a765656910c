"""A bookie's files: readers, writers and the ledger storage built from them."""
