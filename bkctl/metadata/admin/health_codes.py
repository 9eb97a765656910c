"""The codes of health findings; without imports, so that help can list them at once."""

from __future__ import annotations

from enum import StrEnum


class HealthCode(StrEnum):
    """The subject of a health finding; stable, for scripts and mutes."""

    NO_INSTANCE_ID = "no-instance-id"
    NO_WRITABLE_BOOKIE = "no-writable-bookie"
    BOOKIE_DOWN = "bookie-down"
    BOOKIE_UNKNOWN = "bookie-unknown"
    BOOKIE_READ_ONLY = "bookie-read-only"
    BOOKIE_WITHOUT_ADDRESS = "bookie-without-address"
    BOOKIE_WITHOUT_COOKIE = "bookie-without-cookie"
    BOOKIE_UNREGISTERED = "bookie-unregistered"
    BOOKIE_SILENT = "bookie-silent"
    COOKIE_DAMAGED = "cookie-damaged"
    COOKIE_OF_ANOTHER_CLUSTER = "cookie-of-another-cluster"
    DISK_FULL = "disk-full"
    LEDGERS_SET_ASIDE = "ledgers-set-aside"
    LEDGERS_UNREADABLE = "ledgers-unreadable"
    CERTIFICATE_EXPIRES = "certificate-expires"
    BOOKIE_WITHOUT_RACK = "bookie-without-rack"
    TOO_FEW_RACKS = "too-few-racks"
    LEDGERS_IN_FEW_RACKS = "ledgers-in-few-racks"
    SCOPES_ORPHANED = "scopes-orphaned"
    NO_BOOKIE_FOR_SCOPES = "no-bookie-for-scopes"
    MARK_DAMAGED = "mark-damaged"
    UNDERREPLICATED = "underreplicated"
    AUTORECOVERY_DISABLED = "autorecovery-disabled"
    VOTE_DAMAGED = "vote-damaged"
    NO_AUDITOR = "no-auditor"
    NO_AUDITOR_OF_SCOPES = "no-auditor-of-scopes"
