"""A bad variable stops no app: the SDK is left alone, and it is said once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from openai._base_client import SyncAPIClient

import art_patch as art
from art_patch.errors import ConfigError
from art_patch.patching import control
from tests.support.sdk_samples import ASK

BAD = [
    ("ART_PATCH_MODE", "Record"),
    ("ART_PATCH_STORE", "mysql://user:hunter2@host/x"),
    ("ART_PATCH_PROJECT", "a b"),
    ("ART_PATCH_REDACT", "everything"),
    ("ART_PATCH_MATCH", "re:("),
    ("ART_PATCH_SAMPLE_RATE", "2"),
    ("ART_PATCH_QUEUE_MIB", "many"),
    ("ART_PATCH_KEEP_DAYS", "-1"),
    ("ART_PATCH_FEEDBACK_SECRET", "hunter2"),
    ("ART_PATCH_INTEGRATIONS", "nonesuch"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_variable_leaves_the_sdk_alone(
    name: str,
    value: str,
    bench,
    client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("ART_PATCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(control._process, "runtime", None)  # what another test counted
    before = SyncAPIClient.__dict__["request"]
    with caplog.at_level(logging.WARNING, "art_patch"):
        art.patch()
        art.patch(sample_rate=1.0) if name != "ART_PATCH_SAMPLE_RATE" else art.patch()
        assert art.wrap(client) is client
    assert SyncAPIClient.__dict__["request"] is before
    client.chat.completions.create(**ASK)
    assert len(bench.upstream.seen) == 1
    assert not (tmp_path / "home").exists()
    status = art.status()
    assert (status.patched, status.mode, status.recorded) == (False, "off", 0)
    (sentence,) = status.degraded
    (line,) = caplog.messages
    assert name in sentence and sentence in line
    assert "hunter2" not in line

    monkeypatch.delenv(name)
    art.patch(mode="record", home=tmp_path)
    client.chat.completions.create(**ASK)
    assert art.flush(10)
    assert (art.status().patched, art.status().recorded, art.status().degraded) == (True, 1, ())


def test_a_bad_argument_is_still_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ART_PATCH_MODE", "Record")
    with pytest.raises(ConfigError, match="sample_rate"):
        art.patch(sample_rate=2.0)
    with pytest.raises(ConfigError, match="mode"):
        art.patch(mode="Record")  # type: ignore[arg-type]
    assert not art.status().patched


def test_an_argument_stands_in_for_a_bad_variable(bench, client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ART_PATCH_MODE", "Record")
    art.patch(mode="record", home=tmp_path)
    client.chat.completions.create(**ASK)
    assert art.flush(10)
    assert art.status().recorded == 1


def test_a_variable_that_becomes_bad_changes_nothing_of_what_is_in_force(
    bench, client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    art.patch(mode="record", home=tmp_path)
    monkeypatch.setenv("ART_PATCH_MATCH", "re:(")
    art.patch()
    client.chat.completions.create(**ASK)
    assert art.flush(10)
    assert (art.status().patched, art.status().recorded) == (True, 1)
    assert "ART_PATCH_MATCH" in art.status().degraded[0]
