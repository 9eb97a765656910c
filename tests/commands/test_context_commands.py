"""`bkctl context …`, the configuration file, and how a context's settings reach the connection."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path

import pytest

from bkctl.commands.kit.access import connect_to, store_security
from bkctl.commands.kit.contexts import Contexts, toml_values
from bkctl.commands.kit.settings import GlobalOptions, read_environment
from bkctl.errors import AlreadyExists, Conflict, NotFound, UsageError
from bkctl.metadata.cluster import open_cluster

from .conftest import Cli

HAND_WRITTEN = """\
# our clusters
current-context = "prod" # the one that pays

[contexts.prod]
metadata-uri = "zk://p:1/ledgers"
# asked for by Ann
metadata-user = "ann"

# the next one is slow
[contexts.test]
metadata-uri = "zk://t:1/ledgers"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config" / "bkctl" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(HAND_WRITTEN)
    return path


def contexts(file: Path) -> Contexts:
    return Contexts.read({"BKCTL_CONFIG": str(file)})


def test_new_contexts_are_in_the_audit_log(cli: Cli) -> None:
    assert cli("context", "add", "prod", "-u", "zk://h1/ledgers").code == 0
    (added,) = cli("audit", "list", "-o", "json").json
    assert (added["result"], added["command"]) == ("done", "bkctl context add prod -u zk://h1/ledgers")


def test_add_use_list_show_and_delete(cli: Cli, tmp_path: Path) -> None:
    assert cli("context", "list", "-o", "json").json == []
    assert cli("context", "show").code == 2
    added = cli("context", "add", "prod", "-u", "zk://h1,h2/ledgers", "--metadata-user", "ann", "--tls-ca", "ca.pem")
    assert added.code == 0, added.err
    path = tmp_path / "config" / "bkctl" / "config.toml"
    assert tomllib.loads(path.read_text()) == {
        "contexts": {
            "prod": {
                "metadata-uri": "zk://h1:2181;h2:2181/ledgers",
                "metadata-user": "ann",
                "tls-ca": str(Path("ca.pem").absolute()),
            }
        }
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert cli("context", "add", "prod", "-u", "zk://h3/ledgers").code == 5
    assert cli("-u", "sqlite:///x", "context", "add", "here", "--use").code == 0
    assert [(row["name"], row["current"]) for row in cli("context", "list", "-o", "json").json] == [
        ("prod", False), ("here", True),
    ]  # fmt: skip
    assert cli("context", "use", "prod").code == 0
    assert cli("context", "show", "-o", "json").json == {
        "name": "prod",
        "current": True,
        "metadataUri": "zk://h1:2181;h2:2181/ledgers",
        "tlsCa": str(Path("ca.pem").absolute()),
        "metadataUser": "ann",
    }
    assert cli("context", "use", "nowhere").code == 4
    assert cli("context", "delete", "prod").code == 2
    assert cli("context", "delete", "prod", "--yes").code == 0
    assert tomllib.loads(path.read_text()) == {"contexts": {"here": {"metadata-uri": "sqlite:///x"}}}
    assert cli("context", "add", "x", "-u", "nonsense").code == 2
    assert cli("context", "add", "x").code == 2
    for name in ("a b", "local"):
        assert cli("context", "add", name, "-u", "sqlite:///x").code == 2


def test_a_renamed_context_keeps_its_settings_and_stays_current(cli: Cli, file: Path) -> None:
    file.write_text(
        'current-context = "a"\n# kept\n[contexts.a]\nmetadata-uri = "sqlite:///a"\nmetadata-user = "ann"\n\n'
        '[contexts.b]\nmetadata-uri = "sqlite:///b"\n'
    )
    before = file.read_text()
    for names, code in (("a b", 5), ("a a", 5), ("gone c", 4), ("a /", 2), ("a local", 2)):
        assert cli("context", "rename", *names.split()).code == code
        assert file.read_text() == before
    assert cli("context", "rename", "a", "c", "-o", "json").json["name"] == "c"
    assert tomllib.loads(file.read_text()) == {
        "current-context": "c",
        "contexts": {
            "b": {"metadata-uri": "sqlite:///b"},
            "c": {"metadata-uri": "sqlite:///a", "metadata-user": "ann"},
        },
    }
    assert "# kept" in file.read_text()
    assert cli("context", "rename", "b", "d").code == 0
    assert contexts(file).current == "c"


def test_a_context_is_where_commands_connect(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uris = {name: f"sqlite://{tmp_path / name}.db" for name in ("a", "b")}
    for name, uri in uris.items():
        open_cluster(uri, create=True).close()
        assert cli("context", "add", name, "-u", uri).code == 0
    assert cli("context", "use", "a").code == 0

    def connected(*words: str) -> str:
        found: str = cli("cluster", "info", "-o", "json", *words).json["metadataUri"]
        return found

    assert connected() == uris["a"]
    assert connected("-x", "b") == uris["b"]
    assert cli("-x", "b", "cluster", "info", "-o", "json").json["metadataUri"] == uris["b"]
    monkeypatch.setenv("BKCTL_CONTEXT", "b")
    assert connected() == uris["b"]
    assert connected("-x", "a") == uris["a"]
    assert connected("-u", uris["a"]) == uris["a"]
    assert cli("cluster", "info", "-x", "c").code == 4


def test_changes_keep_comments_and_the_rest(file: Path) -> None:
    changed = contexts(file).add("new", GlobalOptions(metadata_uri="zk://n:1/x", bookie_addresses=("b=h:1",)))
    assert file.read_text() == HAND_WRITTEN + (
        '\n[contexts.new]\nmetadata-uri = "zk://n:1/x"\nbookie-address = ["b=h:1"]\n'
    )
    assert changed.get("new").bookie_addresses == ("b=h:1",)
    assert contexts(file).use("test").current == "test"
    assert 'current-context = "test" # the one that pays\n' in file.read_text()
    contexts(file).delete("test")
    assert file.read_text() == (
        HAND_WRITTEN.partition("current-context")[0]
        + '\n[contexts.prod]\nmetadata-uri = "zk://p:1/ledgers"\n# asked for by Ann\nmetadata-user = "ann"\n'
        "\n# the next one is slow\n"
        '\n[contexts.new]\nmetadata-uri = "zk://n:1/x"\nbookie-address = ["b=h:1"]\n'
    )
    contexts(file).add("prod", GlobalOptions(metadata_uri="zk://q:1/x"), replace=True)
    assert contexts(file).get("prod") == GlobalOptions(metadata_uri="zk://q:1/x")
    assert "# the next one is slow" in file.read_text()
    with pytest.raises(AlreadyExists):
        contexts(file).add("prod", GlobalOptions(metadata_uri="zk://q:1/x"))
    with pytest.raises(NotFound):
        contexts(file).delete("test")


def test_deleting_a_context_keeps_the_comments_of_the_next(file: Path) -> None:
    contexts(file).delete("prod")
    assert file.read_text() == (
        '# our clusters\n\n# the next one is slow\n[contexts.test]\nmetadata-uri = "zk://t:1/ledgers"\n'
    )
    contexts(file).delete("test")
    assert file.read_text().split() == ["#", "our", "clusters", "#", "the", "next", "one", "is", "slow"]


@pytest.mark.parametrize(
    "text",
    [
        'contexts = { a = { metadata-uri = "zk://a:1/x" } }\n',
        '[contexts]\na = { metadata-uri = "zk://a:1/x" } # inline\n',
        'contexts.a.metadata-uri = "zk://a:1/x"\n',
        "[contexts.\"a\"]\r\nmetadata-uri = 'zk://a:1/x'\r\n# the end\r\n",
        'current-context = "z"\n[contexts.a]\nmetadata-uri = "zk://a:1/x"\n[contexts.z]\nk = [1, 2] # two\n',
        '[contexts.z]\nmetadata-uri = "zk://z:1/x"\n[contexts.a]\nmetadata-uri = "zk://a:1/x"\n[contexts.y]\n',
        '[contexts]\n[contexts.a]\nmetadata-uri = """zk://a:1/x""" # no end of line',
    ],
)
def test_every_form_of_toml_is_changed_and_all_else_stays(file: Path, text: str) -> None:
    """A refusal (Conflict) leaves the file as it is; that the file says anything else afterwards is never possible."""
    document = tomllib.loads(text)
    one, two = GlobalOptions(metadata_uri="zk://b:1/x", metadata_tls=True), GlobalOptions(metadata_uri='zk://"c\\:1/x')
    changed = {
        "add": document | {"contexts": document["contexts"] | {"b": toml_values(one)}},
        "replace": document | {"contexts": document["contexts"] | {"a": toml_values(two)}},
        "use": document | {"current-context": "a"},
        "delete": document | {"contexts": {key: value for key, value in document["contexts"].items() if key != "a"}},
    }
    if not changed["delete"]["contexts"]:
        del changed["delete"]["contexts"]
    for change, expected in changed.items():
        file.write_text(text, newline="")
        before = contexts(file)
        if change == "add":
            before.add("b", one)
        elif change == "replace":
            before.add("a", two, replace=True)
        elif change == "use":
            before.use("a")
        else:
            before.delete("a")
        assert tomllib.loads(file.read_text()) == expected, change
        comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
        if change != "delete":
            assert all(comment in file.read_text() for comment in comments)
    assert os.listdir(file.parent) == [file.name]


def test_file_that_cannot_be_edited_stays_unchanged(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contexts(file)
    monkeypatch.setattr("tomlkit.TOMLDocument.as_string", lambda self: 'current-context = "prod"\n')
    with pytest.raises(Conflict, match="by hand"):
        before.use("test")
    assert file.read_text() == HAND_WRITTEN
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('metadata-password = "x"', "is a secret"),
        ('token = "x"', "is a secret"),
        ('colour = "x"', "unknown setting 'colour'"),
        ("metadata-user = 1", "wrong kind"),
        ('metadata-tls = "yes"', "wrong kind"),
        ("bookie-address = [1]", "wrong kind"),
    ],
)
def test_secrets_and_unknown_settings_are_refused(file: Path, setting: str, words: str) -> None:
    file.write_text(f'[contexts.a]\nmetadata-uri = "zk://a:1/x"\n{setting}\n')
    with pytest.raises(UsageError, match=words):
        contexts(file).get("a")


@pytest.mark.parametrize("key", ["current_context", "context", "metadata-uri"])
def test_unknown_keys_beside_the_contexts_are_refused(cli: Cli, file: Path, key: str) -> None:
    file.write_text(f'{key} = "prod"\n[contexts.prod]\nmetadata-uri = "zk://p:1/ledgers"\n')
    refused = f"bkctl: {file}: unknown setting '{key}'; known settings: current-context, contexts\n"
    for words in (("context", "list"), ("cluster", "id")):
        done = cli(*words)
        assert (done.code, done.out, done.err) == (2, "", refused)


def test_a_user_in_the_uri_is_refused(file: Path) -> None:
    with pytest.raises(UsageError, match="names a user"):
        contexts(file).add("b", GlobalOptions(metadata_uri="zk://ann:geheim@b:1/x"))
    assert file.read_text() == HAND_WRITTEN


def test_a_file_that_is_a_link_stays_one(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "real.toml"
    file.rename(target)
    file.symlink_to(target)
    target.chmod(0o640)
    contexts(file).use("test")
    assert file.is_symlink()
    assert 'current-context = "test"' in target.read_text()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_logins_come_from_options_then_the_environment_then_the_context(tmp_path: Path, file: Path) -> None:
    for name, password in (("one", "geheim\n"), ("two", "2\r\n")):
        (tmp_path / name).write_text(password)
    file.write_text(
        f'[contexts.a]\nmetadata-uri = "zk://a:1/x"\nmetadata-user = "ann"\nmetadata-tls-ca = "/ca.pem"\n'
        f'metadata-password-file = "{tmp_path / "one"}"\nbookie-address = ["b=h:1"]\n'
    )
    environment = {"BKCTL_CONFIG": str(file)}

    def security(options: GlobalOptions, **more: str) -> object:
        variables = environment | more
        merged = options.over(read_environment(variables))
        connection = connect_to([("", GlobalOptions(context="a"))], variables)
        assert connection.context == "a"
        assert connection.settings.bookie_addresses == ("b=h:1",)
        return store_security(merged.over(connection.settings), variables)

    found = security(GlobalOptions())
    assert (found.user, found.password, found.tls, found.ca) == ("ann", "geheim", True, "/ca.pem")  # type: ignore[attr-defined]
    found = security(GlobalOptions(metadata_sasl=True), BKCTL_METADATA_USER="bob")
    assert (found.user, found.password, found.sasl) == ("bob", "geheim", True)  # type: ignore[attr-defined]
    found = security(GlobalOptions(metadata_password_file=tmp_path / "two"))
    assert found.password == "2"  # type: ignore[attr-defined]
    assert "geheim" not in repr(security(GlobalOptions()))
    # A context that does not name the cluster lends it no login.
    other = connect_to([("", GlobalOptions(metadata_uri="zk://b:1/x", context="a"))], environment)
    assert other.settings == GlobalOptions()
    plain = store_security(GlobalOptions(metadata_user="eve"), {"BKCTL_METADATA_PASSWORD": "geheim"})
    assert (plain.user, plain.password) == ("eve", "geheim")
    with pytest.raises(UsageError, match="needs a password"):
        store_security(GlobalOptions(metadata_user="eve"), {})
    with pytest.raises(UsageError, match="BKCTL_METADATA_TLS"):
        read_environment({"BKCTL_METADATA_TLS": "maybe"})


def test_zk_enable_security_makes_nodes_the_creators_own(tmp_path: Path) -> None:
    conf = tmp_path / "bk.conf"
    conf.write_text("zkEnableSecurity=true\n")
    assert store_security(GlobalOptions(conf=conf), {}).creator_acl
    conf.write_text("zkEnableSecurity=false\n")
    assert not store_security(GlobalOptions(conf=conf), {}).creator_acl
