"""The command lines of the examples' `train.py` and `evaluate.py`, which are all alike."""

from __future__ import annotations

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
    """Add the options that training and evaluation share; give both the same values."""
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
    """Read the options of a `train.py`, train, and print the metric before and after.

    Args:
        train: takes the parsed options and returns `before`, `after` and `wall_s`.
        doc: docstring of the example's module, which is the text of `--help`.
        steps: default of `--steps`, the number of updates.
        metric: the metric's name in the last line.
        options: adds the example's own options to the parser.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
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
    """Read the options of an `evaluate.py`, evaluate, and print a table.

    Args:
        evaluate: takes the parsed options, draws its plot at `options.plot` and returns the evaluation.
        doc: docstring of the example's module, which is the text of `--help`.
        script: `__file__` of the example's module; the plot is written beside it unless `--plot` is given.
        columns: names of the metrics in the table.
        options: adds the example's own options to the parser.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    parser.add_argument("--plot", type=Path, default=Path(script).with_name("result.png"), help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="JSON in place of the table")
    asked = parser.parse_args()
    found = asyncio.run(evaluate(asked))
    print(json.dumps(found.to_json()) if asked.json else found.table(*columns))


async def base_and_trained(model: TrainableModel[Any]) -> list[Model[Any]]:
    """Return the base model and the policy that serves, to evaluate side by side."""
    return [await model.checkpoint(0), await model.checkpoint(await model.get_step())]


def before_and_after(
    before: Evaluation, after: Evaluation, metric: str, began: float, digits: int = 3
) -> dict[str, float]:
    """Return the result of a training that began at `began` on the clock `time.monotonic`."""
    return {
        "before": round(before.models[0].metrics[metric].value, digits),
        "after": round(after.models[0].metrics[metric].value, digits),
        "wall_s": round(time.monotonic() - began, 1),
    }
