"""The BookKeeper client: create, open, add, read, recover, close, delete."""
