"""Bringing ledgers back to full replication: what is missing where, copies to other bookies, who does it when."""
