"""Whether agents of the first frameworks learn: the demo, with the assistants of `examples/frameworks/shop`.

::

    python tests/frameworks/learn.py [--json] [--only langchain litellm] [--seed 1] [--cycles 2]

Each assistant runs in the environment of its framework, patched by its one line; everything else is `art-patch demo`:
traffic, `retrain` with RULER (the stand-in judge), GRPO, gate, promotion, on the embedded engine. The base model is
made for the tool as the framework writes it. About five minutes an assistant on two cores. With `--json` the last line
of stdout is one object of named metrics, with `missed` listing the targets that were not met.

- `before_NAME`, `after_NAME`: sampled success on questions that traffic never asks; `rise_NAME`: the difference.
- `failed_NAME`: calls that failed or fell back, and conversations that ended in an error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from art_patch.demo import run_demo  # noqa: E402 - the lines above make them importable
from art_patch.settings import load_settings  # noqa: E402
from tests.frameworks.shops import SHOPS, program, with_its_tools  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402


class Teller:
    """Shows the curve."""

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Say nothing."""

    def say(self, sentence: str) -> None:
        """A line."""
        say(sentence)

    def measured(self, row: Mapping[str, Any]) -> None:
        """A point of the curve."""
        say(f"cycle {row['cycle']}: sampled {row['sampled']:.3f}, greedy {row['greedy']:.3f}, {row['policy']}")


def main() -> None:
    """Let them learn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of metrics")
    parser.add_argument("--only", nargs="+", choices=SHOPS, default=list(SHOPS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=2)
    given = parser.parse_args()
    metrics: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        for name in given.only:
            say(name)
            settings = load_settings(home=Path(home), project=name.replace("_", "-"))
            settings.directory.mkdir(parents=True)
            agent = with_its_tools(program(name), settings.directory)
            learned = run_demo(
                settings, seed=given.seed, cycles=given.cycles, control=False, tell=Teller(), program=agent
            )
            before, after = learned["success_before"], learned["success_after"]
            metrics |= {f"before_{name}": before, f"after_{name}": after, f"rise_{name}": round(after - before, 4)}
            metrics[f"failed_{name}"] = learned["failed_calls"]
    targets = [Target(f"rise_{name}", 0.3, None, "sampled success") for name in given.only]
    targets += [Target(f"failed_{name}", None, 0, "failed or fell back") for name in given.only]
    finish(metrics, targets, as_json=given.json)


if __name__ == "__main__":
    main()
