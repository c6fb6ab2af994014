"""The patch with the real store behind it."""

from __future__ import annotations

import subprocess
import sys

from art_patch.patching import patch, status
from art_patch.types import Call
from tests.support.sdk_samples import ASK, UPSTREAM, settled


def test_calls_reach_the_store(bench, client, tmp_path):
    from art_patch.context import trajectory
    from art_patch.store import open_store

    url = f"sqlite:///{tmp_path}/store.db"
    with patch(store=url, flush_interval_s=0.01) as handle:
        with trajectory("shop", scenario="s") as run:
            client.chat.completions.create(**ASK)
        client.chat.completions.create(**ASK, stream=True).close()
        handle.unpatch()
    assert status().recorded == 2
    store = open_store(url, create=False)
    try:
        assert store.verify() == []
        (found,) = store.read.trajectories([run.id])
        assert found.info.scenario_key == "s"
        (call,) = found.calls
        assert isinstance(call, Call)
        assert settled(call) == UPSTREAM
    finally:
        store.close()


SCRIPT = """
import sys
import art_patch.patching as art
art.patch(store=sys.argv[1], flush_interval_s=60)
import openai
client = openai.OpenAI(api_key="k", base_url=sys.argv[2])
client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "hi"}])
assert art.status().recorded == 0
"""


def test_a_short_script_loses_nothing(bench, tmp_path):
    from art_patch.store import open_store

    url = f"sqlite:///{tmp_path}/store.db"
    subprocess.run([sys.executable, "-c", SCRIPT, url, bench.upstream.url], check=True, timeout=60)
    store = open_store(url, create=False)
    try:
        assert store.verify() == []
        import sqlite3

        with sqlite3.connect(tmp_path / "store.db") as connection:
            assert connection.execute("SELECT count(*) FROM calls").fetchone() == (1,)
        connection.close()
    finally:
        store.close()
