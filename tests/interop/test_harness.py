"""The servers of the test harness themselves."""

from __future__ import annotations

from servers import ApacheCluster, Java


def test_three_storage_classes_serve_one_cluster_and_come_back_after_a_kill(
    apache_cluster: ApacheCluster, java: Java
) -> None:
    assert len({bookie.storage for bookie in apache_cluster.bookies}) == 3
    victim = apache_cluster.bookies[0]
    victim.kill()
    assert not victim.running
    victim.start()
    listed = java.shell(victim, "listbookies", "-rw", check=True).stdout
    assert all(f"127.0.0.1:{bookie.port}" in listed for bookie in apache_cluster.bookies)
