"""What an operator meets: servers that end while apps ask, policies that are made again, and metrics that are scraped.

::

    python tests/benchmarks/operate.py [--json] [--only servers|reproduce|scrape|search] [--kills 50] [--policies 10]
        [--seconds 240] [--calls 50000] [--seed 0]

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
- `scrape` (`operate_scrape`): one app makes unstreamed routed calls, one after the other, to the server's front over
  an engine that answers at once (a stand-in, so that the front's time shows); the store has 20,000 calls. In one of
  each two seconds, drawn at random, `/metrics` is scraped once. `scrape_added_us_p50`: the median of all calls of the
  seconds with a scrape, minus the median of those of the same seconds that began further than `AFTER_S` from it: what
  else the machine does hits both alike. `scrape_seconds_us_p50` compares seconds with a scrape to their neighbours
  without one (median of the pairs' differences); `scrape_error_us` is its standard error, which tells how busy the
  machine was. `scrape_slowed` is the share of calls within `AFTER_S`, `scrape_ms` the median of a scrape, and
  `observe_us` what counting and timing a request costs the front.
- `search` (`operate_search`): a store of `--calls` calls, in runs of ten with 60 characters of English a message. The
  job indexes it (`index_ms_a_call`, beside the `write_ms_a_call` of the app). Then 200 searches, of eight kinds by
  turns: rare and common words, two words, beginnings, phrases, of a user, two in a run, until a time. Each reads a page
  of 20 with its summaries (`search_ms_p95`). `index_size` compares the vacuumed file with and without the index.
  `index_cost` is how much longer the app's writes take in a store that has an index, p50 of 199 batches of 40 calls;
  both stores take turns. `search_erase_s`: one user of 10,000, until no page has a word of theirs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks import (  # noqa: E402 - the line above makes ours importable
    operate_reproduce,
    operate_scrape,
    operate_search,
    operate_servers,
)
from tests.support.benchmark_report import finish  # noqa: E402

TARGETS = (*operate_servers.TARGETS, *operate_reproduce.TARGETS, *operate_scrape.TARGETS, *operate_search.TARGETS)
PARTS = {
    "servers": lambda given: operate_servers.servers(given.kills, given.seed),
    "reproduce": lambda given: operate_reproduce.reproduce(given.policies, given.seed),
    "scrape": lambda given: operate_scrape.scrape(given.seconds, given.seed),
    "search": lambda given: operate_search.search(given.calls, given.seed),
}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--policies", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=240)
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    metrics: dict[str, Any] = {}
    for name in given.only or PARTS:
        metrics |= PARTS[name](given)
    finish(metrics, TARGETS, as_json=given.json)


if __name__ == "__main__":
    main()
