"""Searching a large store by text: the part `search` of `operate.py`."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from art_patch.store import Filter, Store, open_store
from tests.benchmarks.samples import TEXT, small_run
from tests.support.benchmark_report import Target, percentile, say

TARGETS = (
    Target("search_ms_p95", None, 300, "a page of a search with its summaries, p95, ms"),
    Target("index_size", None, 0.6, "size of the search index / that of the store without it"),
    Target("index_cost", None, 0.05, "time that an app's writes take more in a store that has an index"),
)
CALLS_A_RUN = 10
RUNS_AT_ONCE = 20
PAGE = 20
ASKS = 200


def search(calls: int, seed: int) -> dict[str, Any]:
    """Fill a store, index it, search it, erase from it."""
    random.seed(seed)
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        with closing(open_store(f"sqlite:///{home}/store.db")) as store:
            runs, took = calls // CALLS_A_RUN, 0.0
            for first in range(0, runs, RUNS_AT_ONCE):
                records = [
                    record for number in range(first, first + RUNS_AT_ONCE) for record in small_run(number, 10_000)
                ]
                began = time.perf_counter()
                store.write(records)
                took += time.perf_counter() - began
            say(f"{runs * CALLS_A_RUN} calls written in {took:.0f} s")
            plain, began = _size(store), time.perf_counter()
            store.search.extend()
            indexed = time.perf_counter() - began
            whole = _size(store)
            say(f"indexed in {indexed:.0f} s; {plain / 2**20:.0f} MiB without, {whole / 2**20:.0f} MiB with the index")
            asked = _ask(store, random.Random(seed))
            began = time.perf_counter()
            erased = store.rights.erase(user="user-1").calls
            erase_s = time.perf_counter() - began
        return {
            "search_calls": runs * CALLS_A_RUN,
            **asked,
            "index_size": (whole - plain) / plain,
            "index_ms_a_call": indexed * 1e3 / calls,
            "write_ms_a_call": took * 1e3 / calls,
            "index_cost": _cost(home),
            "search_erase_s": erase_s,
            "search_erased": erased,
        }


def _ask(store: Store, rng: random.Random) -> dict[str, Any]:
    """Search for common and rare words, pairs, beginnings and phrases of the texts, with and without conditions."""
    words = sorted({word.strip("`.,:;()'\"") for word in TEXT.split()} - {""}, key=str)
    spoken = TEXT.split()
    took: dict[str, list[float]] = {}
    found = 0
    for number in range(ASKS):
        place = rng.randrange(len(spoken) - 3)
        kind, queries, filter = (
            ("word", [rng.choice(words)], Filter()),
            ("common", ["the"], Filter()),
            ("two", [" ".join(spoken[place : place + 2])], Filter()),
            ("beginning", [rng.choice(words)[:4] + "*"], Filter()),
            ("phrase", [f'"{" ".join(spoken[place : place + 3])}"'], Filter()),
            ("of a user", ["object"], Filter(user=f"user-{rng.randrange(10_000)}")),
            ("two of a run", ["the", "object"], Filter(policy="agent@1")),
            ("until", ["is"], Filter(until=1.7e9 + rng.random() * 1e4)),
        )[number % 8]
        if not any(character.isalnum() for query in queries for character in query):
            continue
        began = time.perf_counter()
        ids = store.search.find(queries, filter).ids
        store.browse.summaries(ids[:PAGE], openings=True)
        took.setdefault(kind, []).append((time.perf_counter() - began) * 1e3)
        found += bool(ids)
    for kind, values in took.items():
        say(f"{kind}: p50 {statistics.median(values):.0f} ms, most {max(values):.0f} ms")
    every = [value for values in took.values() for value in values]
    return {
        "search_ms_p50": statistics.median(every),
        "search_ms_p95": percentile(every, 0.95),
        "searches_that_found": found / len(every),
    }


def _cost(home: Path) -> float:
    """The time of writes to a store with an index, over that of one without; both take turns, batch by batch."""
    stores = [open_store(f"sqlite:///{home}/{name}.db") for name in ("plain", "indexed")]
    batches = [[record for n in range(4) for record in small_run(number * 4 + n, 100)] for number in range(200)]
    for store in stores:
        store.write(batches[0])
    stores[1].search.extend()
    spent: list[list[float]] = [[], []]
    for number, batch in enumerate(batches[1:]):
        for which in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            stores[which].write(batch)
            spent[which].append(time.perf_counter() - began)
        if number % 20 == 19:
            stores[1].search.extend()
    for store in stores:
        store.close()
    return statistics.median(spent[1]) / statistics.median(spent[0]) - 1


def _size(store: Store) -> int:
    store.maintain.vacuum()
    return store.maintain.stats().bytes
