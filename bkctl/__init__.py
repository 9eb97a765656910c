"""bkctl: administration of Apache BookKeeper with 128-bit ledger ids (BP-35)."""

__version__ = "0.1.0.dev0"
