"""What settings say of grouping reaches the cycle, over a real store and a real embeddings server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from art_patch.cli.options import make_embed
from art_patch.errors import ConfigError
from art_patch.pipeline import Run, group, to_judge
from art_patch.pipeline.cycle_run import CycleConfig
from art_patch.settings import load_settings
from art_patch.store import Store, open_store
from art_patch.types import Call, Choice, TrajectoryInfo
from tests.support.embeddings import serve_embeddings

ASKED = (("a", "I want a refund", ""), ("b", "give me my money back", ""), ("c", "I want a refund", "be brief"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Runs a and b mean the same, a and c say the same under other system prompts."""
    opened = open_store(f"sqlite:///{tmp_path}/store.db")
    for key, text, system in ASKED:
        messages = ({"role": "system", "content": system}, {"role": "user", "content": text})
        answer = Choice(0, {"role": "assistant", "content": "yes"}, "stop")
        opened.write([TrajectoryInfo(key, 1.0), Call(f"{key}-c", key, 1.0, "m", messages, (answer,), policy="agent@0")])
    yield opened
    opened.close()


def a_run(store: Store, **given: Any) -> Run:
    settings = load_settings(**given)
    config = CycleConfig(min_group_size=2, holdout_share=0.0, across=settings.group_across, embed=make_embed(settings))
    return Run(store, cast("Any", None), config, lambda *_, **__: None, now=100.0)


@pytest.mark.parametrize(
    ("across", "model", "together"), [(False, "", ""), (True, "", "ac"), (False, "m", "ab"), (True, "m", "abc")]
)
def test_a_cycle_groups_as_told_and_so_does_what_only_tells_of_it(
    store: Store, across: bool, model: str, together: str
):
    with serve_embeddings() as (url, seen):
        run = a_run(store, group_across=across, embeddings=model or None, embeddings_base_url=url)
        foretold = [sorted(t.id for t in each.trajectories) for each in to_judge(run)]
        assert [sorted(t.id for t in each.trajectories) for each in group(run).groups] == foretold
        assert foretold == ([list(together)] if together else [])
        assert len(seen) == (2 if model else 0)
    assert "embeddings" not in run.metrics["group"]


def test_a_server_that_is_down_stops_nothing_and_the_figure_says_why(store: Store):
    with serve_embeddings() as (url, _):
        pass
    run = a_run(store, group_across=True, embeddings="m", embeddings_base_url=url, embeddings_api_key="secret")
    why = f"m at {url} gave no embeddings: Connection error."
    assert [sorted(t.id for t in each.trajectories) for each in to_judge(run)] == [["a", "c"]]
    assert run.metrics["group"] == {"embeddings": why}
    assert [sorted(t.id for t in each.trajectories) for each in group(run).groups] == [["a", "c"]]
    assert (run.metrics["group"]["groups"], run.metrics["group"]["embeddings"]) == (1, why)


def test_what_cannot_work_is_refused_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch):
    settings = load_settings(embeddings="m", embeddings_base_url="http://x/v1", embeddings_api_key="secret")
    assert "secret" not in repr(settings)
    assert make_embed(load_settings(embeddings_base_url="http://x/v1")) is None
    with pytest.raises(ConfigError, match="ART_PATCH_EMBEDDINGS_BASE_URL"):
        make_embed(load_settings(embeddings="m"))
    with pytest.raises(ConfigError, match="ART_PATCH_EMBEDDINGS_BASE_URL"):
        load_settings(embeddings_base_url="localhost")
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ConfigError, match="needs numpy"):
        make_embed(settings)
