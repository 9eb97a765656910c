"""The command line: one module a group, installed as `bkctl.commands`."""
