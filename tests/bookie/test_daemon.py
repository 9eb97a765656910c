"""The process of a bookie."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.served_bookies import config_for

from bkctl.bookie.bookie import Bookie
from bkctl.daemon import BookieDaemon
from bkctl.formats.names import DIRTY_NAME
from bkctl.metadata.cluster import open_cluster


def test_failure_after_the_start_stops_the_bookie_cleanly(tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"

    def started(bookie: Bookie) -> None:
        assert list(tmp_path.rglob(DIRTY_NAME))
        assert [each.state for each in cluster.bookies.list()] == ["rw"]
        raise BrokenPipeError("stdout")

    with open_cluster(uri, create=True) as cluster:
        daemon = BookieDaemon(config_for(tmp_path, metadata_service_uri=uri))
        with pytest.raises(BrokenPipeError):
            asyncio.run(daemon.run(started))
        daemon.close()
        assert [each.state for each in cluster.bookies.list()] == ["down"]
    assert not list(tmp_path.rglob(DIRTY_NAME))
