"""Each example's `evaluate.py` compares the base model with the trained one and draws its plot."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import art_patch as art
from art_patch.rollouts.evaluation import Evaluated, Mean
from tests.examples.load import load


class Model:
    """A model that is neither served nor trained."""

    def __init__(self, **fields: Any) -> None:
        self.asked: list[str] = []

    async def register(self, backend: Any) -> None: ...

    async def get_step(self) -> int:
        return 3

    async def checkpoint(self, step: int) -> Any:
        return SimpleNamespace(name=f"agent@{step}")

    async def history(self, metric: str) -> list[tuple[int, float]]:
        return [(0, 0.1), (1, 0.2)]


@pytest.mark.parametrize(
    ("example", "metric"),
    [
        ("multiplication", "right"), ("tic_tac_toe", "win_or_draw"), ("game_2048", "score"), ("codenames", "reward"),
        ("temporal_clue", "right"), ("email_search", "right"),
    ],
)  # fmt: skip
def test_an_evaluation_draws_the_metric_that_the_example_is_about(
    example: str, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compared: list[str] = []

    async def evaluate(rollout: Any, scenarios: Any, models: Any, *, runs: int = 1) -> art.Evaluation:
        compared.extend(model.name for model in models)
        assert scenarios
        return art.Evaluation(
            len(scenarios), tuple(Evaluated(model.name, 1, 0, {metric: Mean(0.5, 0.1)}) for model in models)
        )

    pytest.importorskip("matplotlib")
    module = load(example, "evaluate").evaluate
    monkeypatch.setattr(art, "TrainableModel", Model)
    monkeypatch.setattr(art, "LocalBackend", lambda **options: nullcontext())
    monkeypatch.setattr(art, "evaluate", evaluate)
    asked = Namespace(
        base_model="some/model", seed=0, path=None, plot=tmp_path / "result.png", limit=3, inbox=None, questions=None
    )
    found = asyncio.run(module.evaluate(asked))
    assert compared == [model.model for model in found.models] == ["agent@0", "agent@3"]
    assert asked.plot.stat().st_size > 1000
