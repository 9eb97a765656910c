"""The console: sign-in, pages, hostile names and metadata, and a real browser with a checker of accessibility."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from support.raw_http import Answer, call, http_port
from support.servers import Server, require

from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Cookie, Fragment, LedgerMetadata
from bkctl.http.console.pages import FRAGMENTS_DRAWN_MAX, LEDGERS_A_PAGE, PAGES, chart
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import LedgerMarks, mark_path

from .conftest import Gateway, HttpBookie

SCRIPT = "<script>alert(1)</script>"
OVERRIDE = "\u202egnp.exe"
HOSTILE = LedgerId(7, 1)
LONG = LedgerId(0, 2)
MARKED = LedgerId(0, 3)
PATHS = ["", "bookies", "ledgers", "replication", "garbage", "racks", f"ledger/{HOSTILE}", f"ledger/{LONG}"]


def metadata(*, custom: dict[str, bytes] | None = None, fragments: int = 1) -> LedgerMetadata:
    """An open ledger's metadata."""
    return LedgerMetadata(
        2, 2, 2, digest_type=DigestType.CRC32C, password=b"hushhush", custom_metadata=custom or {},
        ensembles=tuple(Fragment(index * 10, (f"b{index % 9}:1", "b9:1")) for index in range(fragments)),
    )  # fmt: skip


class Site(NamedTuple):
    """A gateway with a bookie and some ledgers, its token, and requests by a session or without."""

    port: int
    token: str
    uri: str

    def get(self, path: str, cookie: str | None = None, **headers: str) -> Answer:
        sent = {"Authorization": "Bearer none"} | ({"Cookie": cookie} if cookie else {}) | headers
        return call(self.port, "GET", f"/console/{path}", headers=sent)

    def sign_in(self, token: str, **headers: str) -> Answer:
        sent = {"Authorization": "Bearer none", "Content-Type": "application/x-www-form-urlencoded"} | headers
        return call(self.port, "POST", "/console/login?after=ledgers", f"token={quote(token)}", headers=sent)

    @property
    def cookie(self) -> str:
        return self.sign_in(self.token).headers["set-cookie"].partition(";")[0]


@pytest.fixture(scope="module")
def site(bookie: HttpBookie, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    uri = str(bookie.settings["metadataServiceUri"])
    with open_cluster(uri) as cluster:
        custom = {"application": SCRIPT.encode(), "x": OVERRIDE.encode(), '"><img src=x>': b"a" * 1_000_000}
        cluster.ledgers.create(HOSTILE, metadata(custom=custom))
        cluster.ledgers.create(LONG, metadata(fragments=FRAGMENTS_DRAWN_MAX + 5))
        cluster.ledgers.create(MARKED, metadata())
        LedgerMarks(cluster.store).add(MARKED, ["b0:1"])
        for index in range(LEDGERS_A_PAGE + 20):
            cluster.ledgers.create(LedgerId(9, index), metadata(custom={"application": b"many"}))
    directory = tmp_path_factory.mktemp("gateway")
    full, reader = directory / "full", directory / "reader"
    full.write_text("open-sesame\n")
    reader.write_text("only-reads\n")
    gateway = Gateway(uri, directory, "--token-file", full, "--read-only-token-file", reader)
    gateway.start()
    yield Site(gateway.http_port, "open-sesame", uri)
    gateway.kill()


def test_pages_need_a_session(site: Site) -> None:
    for path in PATHS:
        answer = site.get(path)
        assert answer.status == 303
        assert answer.headers["location"].startswith("/console/login")
    assert site.get("login").status == 200
    assert site.get("bookies", "bkctl_1=x; " + "a=b").status == 303


def test_a_token_opens_a_session_in_a_cookie_that_scripts_and_other_sites_cannot_use(site: Site) -> None:
    assert site.sign_in("wrong").status == 401
    assert "set-cookie" not in site.sign_in("wrong").headers
    assert site.sign_in("&a=b" * 9).status == 401
    for token in (site.token, "only-reads"):
        answer = site.sign_in(token)
        assert (answer.status, answer.headers["location"]) == (303, "/console/ledgers")
        attributes = answer.headers["set-cookie"].lower()
        assert "httponly" in attributes
        assert "samesite=strict" in attributes
        assert token not in attributes
        assert site.get("", answer.headers["set-cookie"].partition(";")[0]).status == 200


def test_space_used_says_how_many_bookies_do_not_answer(site: Site) -> None:
    # A first page may come before the gateway has asked the bookies.
    for _ in range(100):
        if ">Space used</dt>" in site.get("", site.cookie).body.decode():
            break
        time.sleep(0.1)
    assert ">Space used</dt>" in site.get("", site.cookie).body.decode()
    with open_cluster(site.uri) as cluster:
        cluster.cookies.write("gone:1", Cookie("gone:1", ("/j",), ("/l",), instance_id=cluster.instance_id()), NEW)
        try:
            assert "Space used by the 1 of 2 bookies that answer</dt>" in site.get("", site.cookie).body.decode()
        finally:
            cluster.store.delete("cookies/gone:1", None)


def test_signing_out_ends_the_session(site: Site) -> None:
    cookie = site.cookie
    sent = {"Authorization": "Bearer none", "Cookie": cookie}
    assert call(site.port, "POST", "/console/logout", "", headers=sent).status == 303
    assert site.get("", cookie).status == 303


def test_other_sites_cannot_sign_in_and_no_method_changes_anything(site: Site) -> None:
    assert site.sign_in(site.token, Origin="http://elsewhere.example").status == 403
    sent = {"Authorization": "Bearer none", "Cookie": site.cookie}
    for method in ("PUT", "DELETE", "OPTIONS"):
        answer = call(site.port, method, "/console/ledgers", headers=sent)
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


def test_a_session_is_for_pages_only(site: Site) -> None:
    sent = {"Authorization": "Bearer none", "Cookie": site.cookie}
    assert call(site.port, "GET", "/api/v1/ledger/list", headers=sent).status == 401


def test_a_redirect_after_signing_in_stays_on_the_server(site: Site) -> None:
    sent = {"Authorization": "Bearer none", "Content-Type": "application/x-www-form-urlencoded"}
    for target in ("//elsewhere.example", "https://elsewhere.example", "/\\elsewhere.example"):
        path = f"/console/login?after={quote(target, safe='')}"
        answer = call(site.port, "POST", path, f"token={quote(site.token)}", headers=sent)
        assert answer.status == 303
        assert answer.headers["location"].startswith("/console/")


@pytest.mark.parametrize("path", PATHS)
def test_pages_load_nothing_from_elsewhere_and_show_no_password(site: Site, path: str) -> None:
    answer = site.get(path, site.cookie)
    text = answer.body.decode()
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-frame-options"] == "DENY"
    assert "hushhush" not in text
    targets = set(re.findall(r'(?:src|href|action)="([^"]*)"', text)) - {"data:,", "#main"}
    assert [target for target in targets if not re.match(r"/console/(?!/)", target)] == []
    assert "Traceback" not in text


def test_hostile_custom_metadata_stays_text_and_is_cut(site: Site) -> None:
    text = site.get(f"ledger/{HOSTILE}", site.cookie).body.decode()
    assert SCRIPT not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<img" not in text
    assert OVERRIDE not in text
    assert "\\u202egnp.exe" in text
    assert len(text) < 64 << 10
    assert SCRIPT not in site.get("ledgers", site.cookie).body.decode()


def test_a_ledger_is_found_by_any_form_of_its_id(site: Site) -> None:
    for form in ("7:1", f"{7:016x}{1:016x}", "0x7:0x1"):
        answer = site.get(f"ledgers?q={quote(form)}", site.cookie)
        assert (answer.status, answer.headers["location"]) == (303, f"/console/ledger/{quote(str(HOSTILE))}")
    refused = site.get("ledgers?q=nonsense", site.cookie)
    assert refused.status == 400
    assert "/console/bookies" in refused.body.decode()  # The navigation stays.
    assert site.get("ledger/7:99", site.cookie).status == 404
    assert site.get("nothing", site.cookie).status == 404
    assert site.get("ledgers/7", site.cookie).status == 404


def test_the_ledgers_of_a_scope_and_an_application_come_page_by_page(site: Site) -> None:
    seen: list[str] = []
    path: str | None = "ledgers?scope=9&application=many"
    while path is not None:
        text = site.get(path, site.cookie).body.decode()
        seen += re.findall(r'<th scope="row"><a href="[^"]*">([^<]*)<', text)
        following = re.search(r'rel="next" href="/console/([^"]*)"', text)
        path = None if following is None else following[1].replace("&amp;", "&")
    assert seen == [str(LedgerId(9, index)) for index in range(LEDGERS_A_PAGE + 20)]
    assert "None of the" in site.get("ledgers?scope=9&application=other", site.cookie).body.decode()


def test_ledgers_are_found_by_a_bookie_of_their_ensembles(site: Site) -> None:
    text = site.get("ledgers?bookie=b3:1&scope=0", site.cookie).body.decode()
    assert re.findall(r'<th scope="row"><a href="[^"]*">([^<]*)<', text) == [str(LONG)]
    assert "None of the" in site.get("ledgers?bookie=b77:1&scope=0", site.cookie).body.decode()


def test_numbers_of_open_ledgers_are_not_shown_as_known(site: Site) -> None:
    text = site.get(f"ledger/{LONG}", site.cookie).body.decode()
    assert text.count("known once it is closed") == 2
    assert 'b9:1</a> <span class="down">(down)' in text


def test_charts_go_by_time_and_break_where_a_number_is_missing() -> None:
    found = chart("Adds", "a second", [(0, 1.0), (1000, None), (3000, 2.0), (4000, 4.0)])
    assert found.path == "M0.0,35.0h0M180.0,24.0h0L240.0,2.0"
    assert (found.last, found.highest) == (4.0, 4.0)
    assert chart("Adds", "a second", []).path == ""


def test_a_ledger_is_drawn_over_its_entries_and_as_a_table(site: Site) -> None:
    text = site.get(f"ledger/{LONG}", site.cookie).body.decode()
    assert text.count("<rect ") == 2 * FRAGMENTS_DRAWN_MAX
    assert "b0:1: entries 0 to 9" in text
    assert "5 further fragments" in text


def test_marks_and_bookies_are_shown(site: Site) -> None:
    text = site.get("replication", site.cookie).body.decode()
    assert "b0:1 lacks 1" in text
    assert str(MARKED) in text
    assert "Under-replicated: b0:1 lacks entries" in site.get(f"ledger/{MARKED}", site.cookie).body.decode()
    names = re.findall(r'/console/bookie/([^"]+)"', site.get("bookies", site.cookie).body.decode())
    assert len(names) == 1
    assert site.get(f"bookie/{names[0]}", site.cookie).status == 200
    assert site.get("bookie/none", site.cookie).status == 404


def test_damaged_marks_and_votes_leave_the_pages(site: Site) -> None:
    with open_cluster(site.uri) as cluster:
        cluster.ledgers.create(LedgerId(0, 77), metadata())
        cluster.store.put(mark_path(LedgerId(0, 77)), b"damaged", None)
        cluster.store.put("underreplication/auditorelection/V_0000000000", b"damaged", None)
        try:
            for path in ("ledger/77", "replication"):
                answer = site.get(path, site.cookie)
                assert answer.status == 200
                assert "77" in answer.body.decode()
        finally:
            cluster.store.delete(mark_path(LedgerId(0, 77)))
            cluster.store.delete("underreplication/auditorelection/V_0000000000")


def test_the_links_of_the_navigation_are_pages() -> None:
    assert {name for name, page in PAGES.items() if not page.takes_subject} == {
        "", "bookies", "ledgers", "replication", "garbage", "racks",
    }  # fmt: skip


def test_the_link_of_the_command_works_once(site: Site, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "bkctl", "console", "--no-browser", "-o", "json", "-u", site.uri]
    server = Server("console", tmp_path / "console.log", lambda: words, lambda: "enter?key=" in server.log_tail())
    server.start()
    try:
        (link,) = re.findall(r'"url": *"([^"]*)"', server.log_tail())
        path = link.partition(f":{http_port(server)}")[2]
        nobody = {"Authorization": "Bearer none"}
        assert call(http_port(server), "GET", "/console/enter?key=wrong", headers=nobody).status == 403
        answer = call(http_port(server), "GET", path, headers=nobody)
        assert (answer.status, answer.headers["location"]) == (303, "/console/")
        sent = nobody | {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
        assert call(http_port(server), "GET", "/console/", headers=sent).status == 200
        assert call(http_port(server), "GET", path, headers=nobody).status == 403
        assert call(http_port(server), "GET", "/console/", headers=sent | {"Host": "elsewhere.example"}).status == 403
    finally:
        server.kill()


@pytest.fixture
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    if find_spec("playwright") is None or find_spec("axe_playwright_python") is None:
        require("browser", "playwright and axe-playwright-python are not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        require("browser", "chromium is not installed")
    from playwright.sync_api import sync_playwright

    flags = ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
             "disable-component-update", "disable-sync", "disable-dev-shm-usage")  # fmt: skip
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=[f"--{flag}" for flag in flags])
        yield running
        running.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_page_works_in_a_browser_and_is_accessible(site: Site, browser: Any, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    trouble: list[str] = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("dialog", lambda dialog: (trouble.append("a dialog"), dialog.dismiss()))
    page.on("requestfailed", lambda request: trouble.append(request.url))
    page.goto(f"http://127.0.0.1:{site.port}/console/")
    page.get_by_label("Token of the gateway").fill(site.token)
    page.keyboard.press("Enter")
    page.wait_for_url("**/console/")
    axe = Axe()
    for path in PATHS:
        page.goto(f"http://127.0.0.1:{site.port}/console/{path}")
        assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"), path
        found = axe.run(page).response["violations"]
        assert [(path, each["id"]) for each in found] == []
    page.goto(f"http://127.0.0.1:{site.port}/console/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.get_by_label("Ledger", exact=True).fill("7:1")
    page.keyboard.press("Enter")
    page.wait_for_url("**/console/ledger/*")
    assert trouble == []
