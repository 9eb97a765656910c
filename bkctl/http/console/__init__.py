"""The console of a gateway: pages for a browser."""
