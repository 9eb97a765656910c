"""The election of the auditor: numbered ephemeral votes, of which the lowest one wins."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from bkctl.errors import BkctlError
from bkctl.formats.metadata import parse_text, print_text
from bkctl.metadata.store import Claim, MetadataStore, attempt, create_if_missing, value_of
from bkctl.metadata.underreplication.layout import UnderreplicationLayout, base_path

_VOTE: Final = re.compile("V_(-?[0-9]{9,10})", re.ASCII)


class AuditorElection:
    """The elections of one cluster: one for scope 0, shared with Apache's auditors; with `scoped` ours for the rest.

    Methods raise Unreachable, as `MetadataStore`.
    """

    def __init__(self, store: MetadataStore, layout: UnderreplicationLayout | None = None) -> None:
        self.store = store
        self._layout = layout or UnderreplicationLayout(store)

    def votes(self, *, scoped: bool = False) -> tuple[str | BkctlError, ...]:
        """Return the ids of the voting bookies in the order of their votes; the first one is the auditor.

        A damaged vote is returned as its error.
        """
        return tuple(self._voters(self.vote_paths(scoped=scoped)))

    def auditor(self, *, scoped: bool = False) -> str | None:
        """Return the id of the bookie that is auditor now, None without one.

        Raises Corrupt if its vote is damaged; later votes are not parsed. Source: getCurrentAuditor.
        """
        found = next(self._voters(self.vote_paths(scoped=scoped)), None)
        return None if found is None else value_of(found)

    def _voters(self, paths: Sequence[str]) -> Iterator[str | BkctlError]:
        for path, vote in zip(paths, self.store.get_many(paths), strict=True):
            if vote is not None:
                where = f"{path} in {self.store.name}: Vote"
                found = attempt(parse_text, "AuditorVoteFormat", vote.value, where)
                yield found if isinstance(found, BkctlError) else str(found.bookieId)

    def vote(self, bookie_id: str, *, scoped: bool = False) -> Claim:
        """Cast a vote for `bookie_id`, which counts until its release or the session's end. Source: createMyVote."""
        self._layout.prepare()
        election = _election_path(scoped)
        create_if_missing(self.store, election, b"")
        return self.store.claim(f"{election}/V_", _vote_value(bookie_id), numbered=True)

    def vote_paths(self, *, scoped: bool = False) -> tuple[str, ...]:
        """Return the paths of the votes in their order: the owner of the first one is the auditor."""
        election = _election_path(scoped)
        matches = [match for match in map(_VOTE.fullmatch, self.store.children(election) or ()) if match]
        # By number, as Apache does: after 2^31 elections they are negative.
        matches.sort(key=lambda match: int(match[1]))
        return tuple(f"{election}/{match[0]}" for match in matches)

    def announce(self, bookie_id: str, *, scoped: bool = False) -> None:
        """Write the winner into the election's own node, as Apache's auditors do for people who look there."""
        self.store.put(_election_path(scoped), _vote_value(bookie_id), None)

    def was_held(self) -> bool:
        """Return whether this cluster ever had an election of either auditor."""
        return any(self.store.get(_election_path(scoped)) is not None for scoped in (False, True))


def _vote_value(bookie_id: str) -> bytes:
    from bkctl.formats.data_formats_pb2 import AuditorVoteFormat

    return print_text(AuditorVoteFormat(bookieId=bookie_id)).encode("ascii")


def _election_path(scoped: bool) -> str:
    return f"{base_path(scoped)}/auditorelection"
