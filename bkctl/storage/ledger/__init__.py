"""The storage classes of a bookie, Sorted, Interleaved and DbLedgerStorage, and their parts."""
