"""The engine's key: the app reads it from its own project's directory, or from the file that its own settings name."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from art_patch.errors import ConfigError
from art_patch.patching import control, status
from art_patch.serving import EngineClient
from art_patch.settings import Settings
from art_patch.types import Route
from tests.support.patched_sdk import CHAMPION
from tests.support.sdk_samples import ASK, LOCAL, UPSTREAM, settled

SECRET = "TOP-SECRET-TOKEN"


def written(path: Path, mode: int = 0o600, text: str = f"{SECRET}\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def linked(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


def fifo(path: Path) -> Path:
    os.mkfifo(path, 0o600)
    return path


def listening(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(path))
    path.chmod(0o600)
    return path


def grown(path: Path) -> Path:
    return written(path, text="x" * 100_000)


ELSEWHERE: dict[str, Callable[[Path, Path], object]] = {
    "another directory": lambda own, other: written(other / "victim_token"),
    "another project's": lambda own, other: written(own.with_name(f"{own.name}-2") / "engine.key"),
    "a way out": lambda own, other: f"{own}/../{written(other / 'victim_token').relative_to(own.parent)}",
    "a link to it": lambda own, other: linked(own / "engine.key", written(other / "victim_token")),
    "a link to its directory": lambda own, other: (
        linked(own / "d", written(other / "victim_token").parent) / "victim_token"
    ),
    "another secret of the project": lambda own, other: written(own / "retrain.env"),
    "the key of whoever changes the server": lambda own, other: written(own / "admin.key"),
    "relative": lambda own, other: os.path.relpath(written(own / "engine.key")),
    "others may read it": lambda own, other: written(own / "engine.key", 0o640),
    "empty": lambda own, other: written(own / "engine.key", text=" \n"),
    "missing": lambda own, other: own / "engine.key",
    "a directory": lambda own, other: own,
    "a fifo": lambda own, other: fifo(own / "engine.key"),
    "a socket": lambda own, other: listening(own / "engine.key"),
    "a device": lambda own, other: "/dev/zero",
    "a link to a device": lambda own, other: linked(own / "engine.key", Path("/dev/zero")),
    "too large": lambda own, other: grown(own / "engine.key"),
    "no path": lambda own, other: f"{own}/engine.key\0",
}


@pytest.mark.parametrize("how", ELSEWHERE)
def test_a_file_that_is_none_of_its_own_is_never_sent(how: str, bench: Any, client: Any, tmp_path: Path):
    bench.expects_faults = True
    own = tmp_path / "default"
    own.mkdir()
    named = ELSEWHERE[how](own, tmp_path / "other")
    bench.route = Route(champion=CHAMPION, base_url=bench.local.url, key_file=str(named))
    bench.patch(home=tmp_path)
    client.chat.completions.create(**ASK)
    assert bench.local.seen == []
    assert len(bench.upstream.seen) == 1
    assert (bench.sink.call.policy, bench.sink.call.fallback) == (None, "the engine's address or key cannot be used")
    assert status().errors["route.key"] >= 1
    (sentence,) = status().degraded
    assert sentence.startswith("The engine is not asked: ")
    assert "; " in sentence  # and then the cure
    assert SECRET not in repr(status())


def test_a_key_of_the_projects_own_is_sent(bench: Any, client: Any, tmp_path: Path):
    key = written(tmp_path / "default" / "engine.key")
    bench.route = Route(champion=CHAMPION, base_url=bench.local.url, key_file=str(key))
    runtime = bench.patch(home=tmp_path)
    assert SECRET not in repr(runtime.target)
    client.chat.completions.create(**ASK)
    assert bench.local.seen[0].headers["authorization"] == f"Bearer {SECRET}"
    assert (settled(bench.sink.call), status().degraded) == (LOCAL, ())


def test_a_home_that_is_a_link_is_the_same_home(bench: Any, client: Any, tmp_path: Path):
    key = written(tmp_path / "real" / "default" / "engine.key")
    bench.route = Route(champion=CHAMPION, base_url=bench.local.url, key_file=str(key))
    bench.patch(home=linked(tmp_path / "home", tmp_path / "real"))
    client.chat.completions.create(**ASK)
    assert bench.local.seen[0].headers["authorization"] == f"Bearer {SECRET}"


def test_the_apps_own_settings_name_any_file(bench: Any, client: Any, tmp_path: Path):
    own = written(tmp_path / "elsewhere" / "key")
    bench.route = Route(champion=CHAMPION, base_url=bench.local.url, key_file="/etc/shadow")
    bench.patch(home=tmp_path, engine_key_file=own)
    client.chat.completions.create(**ASK)
    assert bench.local.seen[0].headers["authorization"] == f"Bearer {SECRET}"


def test_a_key_that_goes_bad_and_good_again(bench: Any, client: Any, tmp_path: Path):
    """The mode is another matter: it binds although the key is bad."""
    bench.expects_faults = True
    key = written(tmp_path / "default" / "engine.key")
    bench.route = Route(champion=CHAMPION, base_url=bench.local.url, key_file=str(key))
    bench.patch(home=tmp_path)
    client.chat.completions.create(**ASK)
    key.chmod(0o644)
    control._process.runtime.poll()
    client.chat.completions.create(**ASK)
    bench.route = Route(champion=CHAMPION, base_url=bench.local.url, key_file=str(key), mode="record")
    control._process.runtime.poll()
    assert status().mode == "record"
    client.chat.completions.create(**ASK)
    bench.route = Route(champion=CHAMPION, base_url=bench.local.url, key_file=str(key))
    key.chmod(0o600)
    control._process.runtime.poll()
    client.chat.completions.create(**ASK)
    refused = "the engine's address or key cannot be used"
    assert [(c.policy, c.fallback) for c in bench.sink.calls] == [
        (CHAMPION, None), (None, refused), (None, None), (CHAMPION, None),
    ]  # fmt: skip
    assert status().degraded == ()
    assert settled(bench.sink.calls[2]) == UPSTREAM


def test_only_engines_on_the_list_are_called(bench: Any, client: Any, tmp_path: Path):
    """Whoever may write to the store could name another address there."""
    bench.expects_faults = True
    bench.route = Route(champion=CHAMPION, base_url=bench.local.url)
    bench.patch(home=tmp_path, engines="http://10.0.0.7:8700/v1, http://10.0.0.8:8700/v1")
    client.chat.completions.create(**ASK)
    assert bench.local.seen == []
    assert "add it to ART_PATCH_ENGINES" in status().degraded[0]
    (call,) = bench.sink.calls
    assert (call.policy, call.fallback) == (None, "the engine's address or key cannot be used")


@pytest.mark.parametrize("given", [{"engines": "{url}/"}, {"engines": "http://10.0.0.7/v1", "base_url": "{url}"}])
def test_an_engine_on_the_list_or_of_the_apps_own_settings_is_called(bench: Any, client: Any, tmp_path: Path, given):
    url = bench.local.url
    bench.route = Route(champion=CHAMPION, base_url=url)
    bench.patch(home=tmp_path, **{name: value.format(url=url) for name, value in given.items()})
    client.chat.completions.create(**ASK)
    assert len(bench.local.seen) == 1


def test_the_job_calls_no_engine_beside_the_list(tmp_path: Path):
    settings = Settings(home=tmp_path, engines=("http://10.0.0.7:8700/v1",))
    assert EngineClient.of_route(settings, Route(champion=CHAMPION, base_url="http://10.0.0.7:8700/v1/"))
    with pytest.raises(ConfigError, match="the store names the engine 'http://evil"):
        EngineClient.of_route(settings, Route(champion=CHAMPION, base_url="http://evil/v1"))
