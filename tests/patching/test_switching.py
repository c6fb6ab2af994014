"""Switching the patch on and off: idempotent, undone to the identical objects, before and after `import openai`."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import openai
import pytest
import wrapt
from openai._base_client import AsyncAPIClient, SyncAPIClient

import art_patch.patching as art
from art_patch.errors import ConfigError
from art_patch.patching import control
from art_patch.settings import load_settings
from art_patch.types import Route
from tests.support.patched_sdk import CHAMPION
from tests.support.sdk_samples import ASK

PLACES = [(kind, name) for kind in (SyncAPIClient, AsyncAPIClient) for name in ("request", "_process_response")]


def functions() -> list[object]:
    return [kind.__dict__[name] for kind, name in PLACES]


def test_undo_restores_the_identical_objects(bench):
    before = functions()
    bench.patch()
    assert not any(a is b for a, b in zip(before, functions(), strict=True))
    art.unpatch()
    assert all(a is b for a, b in zip(before, functions(), strict=True))
    art.unpatch()


def test_twice_is_once_and_updates_settings(bench, tmp_path, client):
    with art.patch(home=tmp_path, project="a") as handle:
        wrapped = functions()
        art.patch(mode="record")
        assert all(a is b for a, b in zip(wrapped, functions(), strict=True))
        assert art.status().mode == "record"
        assert control._process.runtime.settings.project == "a"
        handle.unpatch()
    assert not art.status().patched
    assert not any(isinstance(function, wrapt.FunctionWrapper) for function in functions())


def test_the_status_has_names_as_json(bench, client):
    """A web framework makes a list of a named tuple."""
    bench.patch(mode="record")
    told = json.loads(json.dumps(art.status().as_dict()))
    assert told.keys() == set(art.status()._fields)
    assert (told["patched"], told["mode"], told["champion"], told["errors"], told["degraded"]) == (
        True, "record", CHAMPION, {}, [],
    )  # fmt: skip


def test_someone_else_on_top(bench, client):
    """Their wrapper stays when we go, ours lets everything through, and patching again does not record twice."""
    original = SyncAPIClient.__dict__["request"]
    bench.patch(mode="record")
    ours, seen = SyncAPIClient.__dict__["request"], []

    def theirs(wrapped, instance, args, kwargs):
        seen.append(args)
        return wrapped(*args, **kwargs)

    SyncAPIClient.request = wrapt.FunctionWrapper(ours, theirs)
    try:
        art.unpatch()
        client.chat.completions.create(**ASK)
        assert bench.sink.calls == []
        bench.patch()
        client.chat.completions.create(**ASK)
        assert len(seen) == 2
        assert bench.sink.call.policy == CHAMPION
        art.unpatch()
    finally:
        SyncAPIClient.request = original


@pytest.mark.parametrize(
    "bad", [{"mode": "on"}, {"project": "../x"}, {"base_url": "127.0.0.1"}, {"timeout_s": 0}, {"store": "mysql://x"}]
)
def test_mistakes_in_arguments_are_told(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        art.patch(**bad)
    assert not art.status().patched


def test_what_is_down_is_told_and_not_raised(bench, client, tmp_path):
    bench.expects_faults = True

    down = True

    def broken(*_: str) -> Route:
        if down:
            raise OSError("disk")
        return Route()

    class Down:
        def write(self, records: object) -> None:
            if down:
                raise OSError("disk full")

    settings = load_settings(home=tmp_path, flush_interval_s=0.005)
    control.start(settings, open_sink=Down, read_route=broken)
    client.chat.completions.create(**ASK)
    assert not art.flush(0.1)
    status = art.status()
    assert status.errors["route.read"] >= 1
    assert status.errors["store.write"] >= 1
    assert status.recorded == 0
    assert len(status.degraded) == 2
    down = False
    control._process.runtime.poll()
    assert art.flush(10)
    assert art.status().recorded == 1
    assert art.status().degraded == ()


def test_an_unknown_sdk_is_left_alone(bench, monkeypatch, client):
    bench.expects_faults = True
    monkeypatch.delattr(AsyncAPIClient, "_process_response")
    before = SyncAPIClient.__dict__["request"]
    bench.patch()
    assert SyncAPIClient.__dict__["request"] is before
    assert "SDK" in art.status().degraded[0]
    client.chat.completions.create(**ASK)


SCRIPT = """
import sys
import art_patch.patching as art
assert not {{"openai", "sqlalchemy", "httpx", "httpx2"}} & set(sys.modules), "imported too much"
import threading
assert threading.active_count() == 1
{body}
from openai._base_client import SyncAPIClient
import wrapt
assert isinstance(SyncAPIClient.__dict__["request"], wrapt.FunctionWrapper)
assert "sqlalchemy" not in sys.modules
assert threading.active_count() == 1
"""


@pytest.mark.parametrize(
    "body",
    ["art.patch(home={home!r}); import openai", "import openai; art.patch(home={home!r})"],
    ids=["before import openai", "after"],
)
def test_import_order(tmp_path, body):
    code = SCRIPT.format(body=body.format(home=str(tmp_path)))
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_unpatched_before_openai_comes(tmp_path):
    code = f"""
import art_patch.patching as art
art.patch(home={str(tmp_path)!r}).unpatch()
from openai._base_client import SyncAPIClient
import wrapt
assert not isinstance(SyncAPIClient.__dict__["request"], wrapt.FunctionWrapper)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_module_level_client(bench, monkeypatch):
    bench.patch()
    monkeypatch.setattr(openai, "api_key", "k")
    monkeypatch.setattr(openai, "base_url", bench.upstream.url)
    try:
        openai.chat.completions.create(**ASK)
    finally:
        openai._reset_client()
    assert bench.sink.call.policy == CHAMPION
