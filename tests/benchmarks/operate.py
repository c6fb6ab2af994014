"""What an operator meets: servers that end while apps ask, and policies that are made again.

::

    python tests/benchmarks/operate.py [--json] [--only servers|reproduce] [--kills 50] [--policies 10] [--seed 0]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met; without it, a table.

- `servers` (`operate_servers`): two `art-patch serve` of the embedded engine, with a tiny model, and an app with four
  threads, which make unstreamed calls all the time. `--kills` times either server, drawn at random, is killed with
  SIGKILL, and started again after `TAKEOVER_S` seconds; a server that starts takes the route. One always lives.
  `failed` counts the calls that raised an error in the app. `unserved` counts the calls that upstream answered later
  than `TAKEOVER_S` after the newest kill, although a server lived. `fell_back` counts all calls that upstream answered:
  those that the killed server had begun to answer, and those until the other one had the route and the app had read it.
  `takeover_most_s` is the longest time from a kill of the server that had the route until the next call began that a
  policy answered. Streams are not asked for: one that has begun ends with an error if its server is killed, whatever
  the other server does.
- `reproduce` (`operate_reproduce`): `--policies` policies of a tiny model, in projects of two, are each made again by
  `art-patch reproduce` in a process of its own. `reproduced` counts those of which no weight differs by more than 1e-6,
  `not_made` those that could not be made again, and `largest_difference` is that of all weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks import operate_reproduce, operate_servers  # noqa: E402 - the line above makes ours importable
from tests.support.benchmark_report import finish  # noqa: E402

TARGETS = (*operate_servers.TARGETS, *operate_reproduce.TARGETS)
PARTS = {
    "servers": lambda given: operate_servers.servers(given.kills, given.seed),
    "reproduce": lambda given: operate_reproduce.reproduce(given.policies, given.seed),
}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--policies", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    metrics: dict[str, Any] = {}
    for name in given.only or PARTS:
        metrics |= PARTS[name](given)
    finish(metrics, TARGETS, as_json=given.json)


if __name__ == "__main__":
    main()
