"""The shared command line of the examples: options and last output line of each `train.py` and `evaluate.py`."""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from art_patch.rollouts import Evaluation, Model, TrainableModel

AddOptions = Callable[[argparse.ArgumentParser], None]


def shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `train.py` and `evaluate.py` of an example share; the user gives both the same values."""
    parser.add_argument("--base-model", help="model directory or Hugging Face id; a tiny one is made unless given")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (%(default)s)")
    parser.add_argument("--path", help="directory for all files; the user's data directory unless given")


def run_training(
    train: Callable[[argparse.Namespace], Coroutine[Any, Any, dict[str, float]]],
    doc: str | None,
    *,
    steps: int,
    metric: str,
    options: AddOptions = shared_options,
) -> None:
    """Run a `train.py`: read its options, train, and print the metric before and after the training.

    `train` takes the parsed options and returns `before`, `after` and `wall_s`; `options` adds the example's own
    options.
    """
    parser = _parser(doc, options)
    parser.add_argument("--steps", type=int, default=steps, help="updates (%(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    asked = parser.parse_args()
    found = asyncio.run(train(asked))
    print(json.dumps(found) if asked.json else f"{metric} {found['before']} -> {found['after']}, {found['wall_s']} s")


def run_evaluation(
    evaluate: Callable[[argparse.Namespace], Coroutine[Any, Any, Evaluation]],
    doc: str | None,
    *,
    script: str,
    columns: tuple[str, ...],
    options: AddOptions = shared_options,
) -> None:
    """Run an `evaluate.py`: read its options, evaluate, and print a table whose columns are the metrics `columns`.

    `evaluate` draws its plot at `options.plot`: beside `script`, the example's `__file__`, unless `--plot` is given.
    `doc` and `options` are as in `run_training`.
    """
    parser = _parser(doc, options)
    parser.add_argument("--plot", type=Path, default=Path(script).with_name("result.png"), help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="JSON in place of the table")
    asked = parser.parse_args()
    found = asyncio.run(evaluate(asked))
    print(json.dumps(found.to_json()) if asked.json else found.table(*columns))


def _parser(doc: str | None, options: AddOptions) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    return parser


async def base_and_trained(model: TrainableModel[Any]) -> list[Model[Any]]:
    """Return two models to compare in `evaluate`: the base model and the champion."""
    return [await model.checkpoint(0), await model.checkpoint(await model.get_step())]


def before_and_after(
    before: Evaluation, after: Evaluation, metric: str, began: float, digits: int = 3
) -> dict[str, float]:
    """Return the first model's mean of `metric` in both evaluations, and the time since `began` (monotonic clock)."""
    old, new = (round(found.models[0].metrics[metric].value, digits) for found in (before, after))
    return {"before": old, "after": new, "wall_s": round(time.monotonic() - began, 1)}
