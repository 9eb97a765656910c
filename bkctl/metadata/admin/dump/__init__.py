"""A cluster's metadata as a stream of records: exported, imported, copied from store to store, and compared.

An export is ndjson, in the order below, so that two exports are compared record by record:

    {"format": "bkctl-metadata", "version": 1, "time": …, "metadataUri": …, "instanceId": …, "layout": "<base64>"}
    {"kind": "node", "key": "underreplication/disable", "value": "<base64>"}       switches, clocks, mutes, racks
    {"kind": "cookie", "key": "10.0.0.1:3181", "value": "<base64>"}                 by bookie id
    {"kind": "sequence", "key": "ledger", "value": "<base64 of a decimal>"}         lower ids of scope 0 may be taken
    {"kind": "mark", "key": "<32 hex>", "value": "<base64>"}                        under-replicated ledgers, by id
    {"kind": "ledger", "key": "<32 hex>", "value": "<base64>", "ctime": <ms>}       by id; ctime if it is known
    {"kind": "end", "records": <count>, "sha256": "<hex>"}                          of all lines before

Values are the bytes that the store holds, including ledger passwords. Nodes of sessions (registrations, locks, votes)
are not exported. An export without its last line is incomplete.
"""
