"""Elections of auditors."""

from __future__ import annotations

import asyncio
import contextlib

from replication.recovering import eventually, running

from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.underreplication import AuditorElection
from bkctl.replication.auditor import AuditorElector


class Candidate:
    """An elector with a store session of its own."""

    def __init__(self, uri, name, *, scoped=False):
        self.cluster = open_cluster(uri)
        self.terms = 0
        self.ended = 0
        self.elector = AuditorElector(
            AuditorElection(self.cluster.store), name, self._audit, scoped=scoped, back_off_s=0.05
        )

    async def _audit(self):
        self.terms += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1


async def test_next_voter_is_elected_when_auditor_leaves(fake_cluster):
    async with fake_cluster(0) as cluster, contextlib.AsyncExitStack() as stack:
        uri = cluster.cluster.uri
        first, second, scoped = Candidate(uri, "a:1"), Candidate(uri, "b:2"), Candidate(uri, "b:2", scoped=True)
        election = AuditorElection(cluster.cluster.store)
        leading = asyncio.ensure_future(first.elector.run())
        await eventually(lambda: first.elector.elected, "the first one is elected")
        await stack.enter_async_context(running(second.elector.run()))
        await stack.enter_async_context(running(scoped.elector.run()))
        await eventually(lambda: scoped.elector.elected, "elections of scopes are their own")
        await eventually(lambda: election.votes() == ("a:1", "b:2"), "both votes are cast")
        assert (second.elector.elected, second.terms) == (False, 0)
        leading.cancel()
        await asyncio.wait([leading])
        await eventually(lambda: second.elector.elected, "the second one follows")
        assert (election.votes(), first.ended, first.elector.elected) == (("b:2",), 1, False)
        assert cluster.cluster.store.get("underreplication/auditorelection").value == b'bookieId: "b:2"\n'
        for each in (first, second, scoped):
            stack.callback(each.cluster.close)


async def test_elector_votes_again_after_losing_its_vote(fake_cluster):
    async with fake_cluster(0) as cluster:
        first, second = (Candidate(cluster.cluster.uri, name) for name in ("a:1", "b:2"))
        election = AuditorElection(cluster.cluster.store)
        async with running(first.elector.run()), running(second.elector.run()):
            await eventually(lambda: len(election.votes()) == 2, "both votes are cast")
            await eventually(lambda: first.elector.elected or second.elector.elected, "one is elected")
            loser, winner = (first, second) if first.elector.elected else (second, first)
            cluster.cluster.store.delete(election.vote_paths()[0])  # as the end of a session does
            await eventually(lambda: winner.elector.elected and loser.ended == 1, "the other one takes over")
            await eventually(lambda: len(election.votes()) == 2, "it votes again, and waits")
            assert (loser.elector.elected, loser.terms, winner.terms) == (False, 1, 1)
        first.cluster.close()
        second.cluster.close()
        assert election.votes() == ()


async def test_waiting_elector_replaces_vanished_vote(fake_cluster):
    async with fake_cluster(0) as cluster:
        election = AuditorElection(cluster.cluster.store)
        other = election.vote("apache:1")
        candidate = Candidate(cluster.cluster.uri, "b:2")
        async with running(candidate.elector.run()):
            await eventually(lambda: len(election.votes()) == 2, "its vote is cast")
            cluster.cluster.store.delete(election.vote_paths()[1])
            await eventually(lambda: candidate.elector.attempt_count == 2, "it votes again")
            other.release()
            await eventually(lambda: candidate.elector.elected, "and is elected")
        candidate.cluster.close()
