"""What an armed integration adds to a call, over the bare patch.

::

    python tests/frameworks/overhead.py [--json] [--only langchain litellm] [--runs 400]

Each framework runs in an environment of its own (`overhead_app.py`), the integration's hook in place and out of it in
turns, and one in its place that does nothing. With `--json` the last line of stdout is one object of named metrics,
with `missed` listing the targets that were not met.

- `added_us_NAME`: CPU time that a call costs the app's thread more, microseconds: the framework's dispatch to a hook
  and what the hook does, tools and the run itself spread over its eight calls.
- `dispatch_us_NAME`: how much of that the framework takes for a hook that does nothing.
- `ratio_NAME`: armed against bare.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.frameworks.shops import program  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402 - the line above makes them importable
from tests.support.environments import run_app  # noqa: E402
from tests.support.recorded import store_url  # noqa: E402

NAMES = ("langchain", "openai_agents", "litellm", "pydantic_ai")
MOST_US = 10


def main() -> None:
    """Measure them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of metrics")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--runs", type=int, default=400)
    given = parser.parse_args()
    metrics: dict[str, Any] = {}
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            python = Path(program(name).python)
            took = run_app(python, "overhead_app.py", name, store_url(Path(folder)), str(given.runs))
        if took["errors"]:
            sys.exit(f"{name}: faults of ours: {took['errors']}")
        say(f"{name}: {took}")
        metrics[f"added_us_{name}"] = took["armed_us"] - took["bare_us"]
        metrics[f"dispatch_us_{name}"] = took["idle_us"] - took["bare_us"]
        metrics[f"ratio_{name}"] = took["armed_us"] / took["bare_us"]
    targets = [Target(f"added_us_{name}", None, MOST_US, "CPU time a call, us") for name in given.only]
    finish(metrics, targets, as_json=given.json)


if __name__ == "__main__":
    main()
