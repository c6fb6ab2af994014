"""`policies export` and `policies push`: what is written, what arrives at a hub, and every way to be refused."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.errors import AdapterRejected, ConfigError, HubError, ModelNotFound, StoreError
from art_patch.policies import base_fingerprint
from art_patch.store import open_store
from art_patch.types import Policy
from tests.support.hub_stand_in import COMMIT, READER, WRITER, StandInHub, serve_stand_in_hub
from tests.support.tiny import make_tiny_adapter, make_tiny_model

# huggingface_hub hands files to httpx by an older word for it
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

GATE = {
    "candidate": 0.8, "champion": 0.5, "lower_bound": 0.125, "scenarios": 12, "judge": "openai/judge", "rubric": "r1",
    "config": {"level": 0.95}, "checks": [{"name": "check of eve@example.org", "passed": True}],
}  # fmt: skip
ADAPTER_FILES = ["MANIFEST.json", "README.md", "adapter_config.json", "adapter_model.safetensors"]
MERGED_FILES = [
    "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the hub's cache keeps a base, so that its name is known."""
    cache = tmp_path_factory.mktemp("cache")
    return make_tiny_model(cache / "models--org--tiny-base" / "snapshots" / "abc", hidden=32, vocab_size=320)


@pytest.fixture
def home(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = make_tiny_adapter(tmp_path / "default" / "adapters", base, "agent", 1)
    with closing(open_store(url_of(tmp_path))) as store:
        store.ledger.add_base("agent@0", str(base), base_fingerprint(base), who="test")
        metrics = {"gate": GATE, "watch": {"verdict": "promote", "hours": 2.0, "signals": {}}}
        policy = Policy(
            "agent@1", str(base), base_fingerprint(base), "candidate", time.time(), str(path), "agent@0", metrics
        )
        store.ledger.add_candidate(policy, trained_on=[], who="test")
        store.ledger.move("agent@1", "champion", who="test", reason="eve@example.org liked it")
    monkeypatch.setenv("ART_PATCH_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nothing"))
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with serve_stand_in_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield served


def url_of(home: Path) -> str:
    return f"sqlite:///{home}/default/store.db"


def said(*arguments: str | Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["policies", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(error: type[Exception], words: str, *arguments: str | Path) -> None:
    with pytest.raises(error, match=words):
        CliRunner().invoke(app, ["policies", *map(str, arguments)], catch_exceptions=False)


def audited(home: Path) -> list[tuple[str, dict[str, Any]]]:
    """What the audit log says of copies."""
    engine = create_engine(url_of(home))
    with engine.connect() as connection:
        rows = connection.execute(
            text("select action, detail from audit where action like '%polic%' order by id")
        ).all()
    engine.dispose()
    with closing(open_store(url_of(home))) as store:
        assert store.verify() == []
    return [
        (action, json.loads(detail)) for action, detail in rows if action.split()[0] in ("export", "push", "pushed")
    ]


def test_a_policy_is_exported_merged_or_alone_and_the_audit_log_says_so(home: Path, base: Path):
    merged = said("export", "agent@1", home / "out" / "merged", "--merged")
    assert sorted(merged["files"]) == MERGED_FILES
    assert (merged["kind"], merged["dtype"], merged["base_id"]) == ("merged", "float32", "org/tiny-base")
    alone = said("export", "agent@1", home / "alone")
    assert alone["files"] == {name: (home / "alone" / name).stat().st_size for name in ADAPTER_FILES}
    assert [(a, d["policy"], d["kind"], d["directory"]) for a, d in audited(home)] == [
        ("export policy", "agent@1", "merged", str(home / "out" / "merged")),
        ("export policy", "agent@1", "adapter", str(home / "alone")),
    ]
    assert (home / "alone").stat().st_mode & 0o777 == 0o700
    card = (home / "out" / "merged" / "README.md").read_text()
    for words in (
        'base_model: "org/tiny-base"',
        "| this policy | 0.800 |",
        "with 95% confidence | +0.125 |",
        "ended: promote",
    ):
        assert words in card
    texts = [path.read_text() for path in (home / "out" / "merged").iterdir() if path.suffix != ".safetensors"]
    assert not [text for text in texts if str(base) in text or str(home) in text or "eve@example.org" in text]
    assert "license" not in card.split("---")[1]


def test_an_export_is_refused_and_leaves_nothing(home: Path, base: Path, tmp_path_factory: pytest.TempPathFactory):
    (home / "full").mkdir()
    (home / "full" / "mine.txt").touch()
    there = sorted(home.iterdir())
    refused(ConfigError, "is not an empty directory", "export", "agent@1", home / "full", "--merged")
    refused(ConfigError, "is the base model itself", "export", "agent@0", home / "out")
    refused(StoreError, "no policy 'agent@7'", "export", "agent@7", home / "out")
    refused(ConfigError, "give it with --merged", "export", "agent@1", home / "out", "--dtype", "float16")
    refused(ConfigError, "go behind its name", "--json", "export", "agent@1", home / "out")
    other = make_tiny_model(tmp_path_factory.mktemp("other"), seed=5, hidden=32, vocab_size=320)
    refused(AdapterRejected, "is another model .*--base", "export", "agent@1", home / "out", "--base", other)
    refused(ModelNotFound, "no base model", "export", "agent@1", home / "out", "--base", home / "gone")
    weights = home / "default" / "adapters" / "agent@1" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    refused(AdapterRejected, "sha256 differs", "export", "agent@1", home / "out", "--merged")
    assert (sorted(home.iterdir()), audited(home)) == (there, [])


def test_what_is_not_installed_is_named(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    refused(
        ConfigError, r"needs peft; run: pip install .art-patch\[train\]", "export", "agent@1", home / "out", "--merged"
    )
    assert said("export", "agent@1", home / "out")["kind"] == "adapter"


def test_what_is_pushed_arrives_byte_for_byte(home: Path, hub: StandInHub):
    dry = said("push", "agent@1", "me/agent", "--merged", "--dry-run")
    assert (hub.requests, hub.repositories, dry["dry_run"]) == ([], {}, True)
    done = said("push", "agent@1", "me/agent", "--merged", "--license", "apache-2.0")
    assert (done["url"], done["commit"], done["private"]) == (f"{hub.url}/me/agent", COMMIT, True)
    assert hub.private == {"me/agent": True}
    arrived = hub.repositories["me/agent"]
    assert {name: len(content) for name, content in arrived.items()} == done["files"]
    said("export", "agent@1", home / "same", "--merged", "--license", "apache-2.0")
    assert arrived == {path.name: path.read_bytes() for path in (home / "same").iterdir()}
    assert f"PUT /blobs/{next(iter(hub.blobs))}" in hub.requests
    actions = audited(home)[:2]
    assert [(action, detail["repository"]) for action, detail in actions] == [
        ("push policy", "me/agent"),
        ("pushed policy", "me/agent"),
    ]
    assert not list((home / "default").glob(".push*"))
    # An update takes the place of what an earlier push left, and of nothing else.
    arrived["notes.md"] = b"mine"
    hub.private["me/agent"] = False
    refused(ConfigError, "as visible as it is", "push", "agent@1", "me/agent", "--update", "--private")
    assert said("push", "agent@1", "me/agent", "--update")["private"] is False
    assert sorted(arrived) == sorted([*ADAPTER_FILES, "notes.md"])
    assert json.loads(arrived["adapter_config.json"])["base_model_name_or_path"] == "org/tiny-base"


def test_a_push_that_fails_says_why_and_what_there_is(home: Path, hub: StandInHub, monkeypatch: pytest.MonkeyPatch):
    push = ("push", "agent@1", "me/agent")
    refused(ConfigError, "write OWNER/NAME", "push", "agent@1", "agent")
    refused(HubError, "no such repository .*leave --update out", *push, "--update")
    hub.fails = "/commit/main"
    refused(
        HubError, "answered 400 .the disk of the hub is full.*empty now; push again with --update", *push, "--public"
    )
    assert (hub.repositories, hub.private) == ({"me/agent": {}}, {"me/agent": False})
    assert [action for action, _ in audited(home)] == ["push policy"]
    hub.fails = "nothing"
    refused(HubError, "there already .*add --update", *push)
    monkeypatch.setenv("HF_TOKEN", READER)
    refused(HubError, "may not write there .You don't have the rights", "push", "agent@1", "me/other")
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    refused(HubError, "does not know the token", "push", "agent@1", "me/other")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused(HubError, "http://127.0.0.1:9 cannot be asked", "push", "agent@1", "me/other")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(home / "token"))
    refused(ConfigError, "there is no token.*HF_TOKEN", *push)
    assert said(*push, "--dry-run")["files"].keys() == set(ADAPTER_FILES)
    assert hub.repositories == {"me/agent": {}}
