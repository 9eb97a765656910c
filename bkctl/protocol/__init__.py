"""BookKeeper's wire protocols v2 and v3 as one set of values, and the connections that carry them."""
