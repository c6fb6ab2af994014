"""What the store takes and gives: ingest, size, contention, kills, queries as it grows, erasing.

::

    python tests/benchmarks/store.py [--json] [--quick | --full] [--only PART]... [--url URL]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met; without it, a table. Minutes; `--quick` takes less than one; `--full` builds a store of a
million calls for the queries.

How it is measured:

- `ingest_*`: one writer, batches of 100, calls of 6 KB of text (1 KB of it the same system prompt, the rest new) and
  250 sampled tokens with log-probabilities (2 KB). `raw` is what one would write by hand: `json.dumps` of the messages
  and `sqlite3.executemany` into one table with two more indexes, `synchronous=NORMAL`. `ingest_vs_executemany` leaves
  the serialising out of raw's time, as nobody can. Both sides take turns, batch by batch.
- `trajectory_kib`: an agent of 20 turns whose last prompt has 37 KB, about 8,000 tokens, with 120 sampled ids and
  log-probabilities a turn. Bytes of the file after a checkpoint, divided by trajectories. `naive` writes each request
  whole. `trajectory_with_prompt_ids_kib` also keeps the exact ids of every prompt, as calls of a policy do; they are
  drawn at random here, which compresses worse than ids of text.
- `lock_errors`, `commit_ms_*`: 8 processes that write 200 calls a second each for some seconds, a batch every 0.1 s as
  the recorder does it, while a reader asks for work. A commit is a whole `write`, waiting for the lock included.
- `lost`, `corrupt`: patched apps are killed (`kill -9`) at random moments. A call counts as acknowledged once a flush
  has returned after it; `unflushed_ms_max` is how long before the kill the oldest call that is missing had been made.
- `unscored_ms`, `fetch_ms`: p50 of asking for the groups to score and of reading one group whole; `growth` is the
  largest quotient of the big store's and the one of a tenth of its size.
- `many_projects_ratio`: fetching, listing and erasing in a project of 800 calls, alone in its store and as one of 100
  such projects; p50 of both, which take turns, and the largest quotient.
- `erase_s`: one user of 10,000, all their calls with everything that hangs on them; `erase_chunk_ms_max` is the
  longest transaction.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch._lib.ids import new_id  # noqa: E402 - the line above makes it importable
from art_patch.store import Filter, Store, open_store  # noqa: E402
from art_patch.types import Call, Group, Record, Trajectory, TrajectoryInfo  # noqa: E402
from tests.benchmarks.samples import Pair, agent_run, big_call, small_run  # noqa: E402
from tests.support.benchmark_report import Target, finish, percentile, say  # noqa: E402

Metrics = dict[str, Any]


TARGETS = (
    Target("ingest_vs_raw", 0.6, None, "calls a second, ours / raw sqlite3"),
    Target("ingest_per_s", 10_000, None, "calls a second, one writer"),
    Target("trajectory_kib", None, 60, "a 20-turn trajectory with 8,000 tokens, KiB"),
    Target("lock_errors", None, 0, "8 processes x 200 calls/s: errors"),
    Target("contention_lost", None, 0, "8 processes x 200 calls/s: calls lost"),
    Target("commit_ms_p99", None, 50, "8 processes x 200 calls/s: commit p99, ms"),
    Target("commit_ms_max", None, 250, "8 processes x 200 calls/s: worst commit, ms"),
    Target("lost", None, 0, "kill -9: acknowledged calls that are missing"),
    Target("corrupt", None, 0, "kill -9: stores that are not sound"),
    Target("unscored_ms", None, 5, "groups to score, p50, ms"),
    Target("fetch_ms", None, 5, "one group whole, p50, ms"),
    Target("growth", None, 1.5, "slowest of these, whole store / a tenth of it"),
    Target("erase_s", None, 2, "erase one user of 10,000, s"),
    Target("erase_chunk_ms_max", None, 50, "the longest transaction of it, ms"),
    Target("many_projects_ratio", None, 1.2, "slowest query, 100 projects in the store / one"),
)


class Scale(NamedTuple):
    """How much of everything is run."""

    ingest_batches: int
    agents: int
    contention_s: float
    kills: int
    calls: int
    asks: int


FULL = Scale(ingest_batches=120, agents=100, contention_s=20, kills=200, calls=1_000_000, asks=200)
USUAL = Scale(ingest_batches=60, agents=100, contention_s=10, kills=40, calls=100_000, asks=100)
QUICK = Scale(ingest_batches=10, agents=15, contention_s=3, kills=5, calls=10_000, asks=30)

PROCESSES = 8
PROJECTS, RUNS, USERS = 100, 80, 16  # of `part_projects`: ten calls a run, five runs a user
ALL = Filter()
CALLS_A_SECOND = 200


# Ingest.


class Raw:
    """One table by hand."""

    def __init__(self, path: Path) -> None:
        self.database = sqlite3.connect(path, isolation_level=None)
        self.database.execute("PRAGMA journal_mode=WAL")
        self.database.execute("PRAGMA synchronous=NORMAL")
        self.database.execute(
            "CREATE TABLE calls (id TEXT PRIMARY KEY, trajectory TEXT, at REAL, body TEXT, tokens BLOB) WITHOUT ROWID"
        )
        self.database.execute("CREATE INDEX by_trajectory ON calls (trajectory)")
        self.database.execute("CREATE INDEX by_time ON calls (at)")

    def write(self, rows: list[tuple[Any, ...]]) -> None:
        self.database.execute("BEGIN IMMEDIATE")
        self.database.executemany("INSERT INTO calls VALUES (?, ?, ?, ?, ?)", rows)
        self.database.execute("COMMIT")


def raw_row(call: Call) -> tuple[Any, ...]:
    answer = call.choices[0]
    body = json.dumps({"messages": [*call.messages, answer.message], "policy": call.policy, "params": call.params})
    tokens = array("I", answer.token_ids or ()).tobytes() + array("f", answer.logprobs or ()).tobytes()
    return call.id, call.trajectory_id, call.started_at, body, tokens


def part_ingest(scale: Scale, home: Path, _url: str | None) -> Metrics:
    """Calls a second."""
    raw, store = Raw(home / "raw.db"), open_store(f"sqlite:///{home}/ingest.db")
    ours_s: list[float] = []
    raw_s: list[float] = []
    inserting_s: list[float] = []
    clock = time.perf_counter

    def write_raw(batch: list[Pair]) -> None:
        start = clock()
        rows = [raw_row(call) for _, call in batch]
        middle = clock()
        raw.write(rows)
        end = clock()
        raw_s.append(end - start)
        inserting_s.append(end - middle)

    def write_ours(batch: list[Pair]) -> None:
        start = clock()
        store.write([record for pair in batch for record in pair])
        ours_s.append(clock() - start)

    for turn in range(scale.ingest_batches + 3):
        batch = [big_call() for _ in range(100)]
        for write in (write_raw, write_ours) if turn % 2 else (write_ours, write_raw):
            write(batch)
    for took in (ours_s, raw_s, inserting_s):
        del took[:3]  # warm-up
    calls = 100 * len(ours_s)
    problems = store.verify()
    store.close()
    assert not problems, problems
    return {
        "ingest_per_s": calls / sum(ours_s),
        "ingest_raw_per_s": calls / sum(raw_s),
        "ingest_vs_raw": sum(raw_s) / sum(ours_s),
        "ingest_vs_executemany": sum(inserting_s) / sum(ours_s),
    }


# Size.


def size(scale: Scale, path: Path, prompt_ids: bool) -> tuple[float, float]:
    store = open_store(f"sqlite:///{path}")
    naive = 0
    for _ in range(scale.agents):
        records, weight = agent_run(prompt_ids)
        naive += weight
        for start in range(0, len(records), 7):  # as calls come, not all at once
            store.write(records[start : start + 7])
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path.stat().st_size / scale.agents / 1024, naive / scale.agents / 1024


def part_size(scale: Scale, home: Path, _url: str | None) -> Metrics:
    """Bytes a trajectory."""
    kib, naive = size(scale, home / "size.db", False)
    exact, exact_naive = size(scale, home / "exact.db", True)
    return {
        "trajectory_kib": kib,
        "trajectory_naive_kib": naive,
        "trajectory_with_prompt_ids_kib": exact,
        "trajectory_with_prompt_ids_naive_kib": exact_naive,
    }


# Contention.


def python(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *args], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def part_contention(scale: Scale, home: Path, _url: str | None) -> Metrics:
    """Eight processes write at once."""
    url = f"sqlite:///{home}/contention.db"
    store = open_store(url)
    writers = [
        python("tests.benchmarks.store_worker", "pace", url, str(me), str(scale.contention_s))
        for me in range(PROCESSES)
    ]
    for writer in writers:
        line(writer)
    for writer in writers:
        tell(writer, "go")
    wal = Path(f"{home}/contention.db-wal")
    asked, most_wal = 0, 0
    while any(writer.poll() is None for writer in writers[:1]):
        store.read.group_ids(state="formed")
        asked, most_wal = asked + 1, max(most_wal, wal.stat().st_size)
        time.sleep(0.05)
    told = [json.loads(line(writer)) for writer in writers]
    for writer in writers:
        writer.communicate()
    written = sum(one["written"] for one in told)
    took = [ms for one in told for ms in one["took_ms"]]
    problems = store.verify()
    found = store.read.counts()["calls"]
    store.close()
    return {
        "lock_errors": sum(one["errors"] for one in told),
        "contention_lost": written - found,
        "contention_per_s": written / scale.contention_s,
        "commit_ms_p50": statistics.median(took),
        "commit_ms_p99": percentile(took, 0.99),
        "commit_ms_max": max(took),
        "contention_wal_mib": most_wal / 2**20,
        "contention_problems": len(problems),
    }


# Kills.


@contextmanager
def upstream() -> Iterator[str]:
    with python("tests.benchmarks.stub") as process:
        yield f"http://127.0.0.1:{line(process)}/v1"
        process.communicate()


class App:
    """What a killed app had said before."""

    def __init__(self) -> None:
        self.called: dict[int, float] = {}
        self.acknowledged = -1


def part_kills(scale: Scale, home: Path, _url: str | None) -> Metrics:
    """Apps are killed."""
    path = home / "kills.db"
    open_store(f"sqlite:///{path}").close()
    told: dict[int, App] = {}
    killed_at: dict[int, float] = {}
    with upstream() as address:
        parents = [python("tests.benchmarks.store_worker", "apps", f"sqlite:///{path}", address) for _ in range(4)]
        children: dict[int, int] = {}

        def listen(parent: subprocess.Popen[str]) -> None:
            for words in iter(lambda: line(parent).split(), []):
                what, number, value, at = words[0], int(words[1]), int(words[2]), float(words[3])
                if what == "started":
                    children[number] = value
                elif what == "called":
                    told.setdefault(number, App()).called[value] = at
                elif what == "acknowledged":
                    told.setdefault(number, App()).acknowledged = value

        ears = [threading.Thread(target=listen, args=(parent,)) for parent in parents]
        for ear in ears:
            ear.start()

        def kill_some(parent: subprocess.Popen[str], numbers: list[int]) -> None:
            for number in numbers:
                tell(parent, str(number))
                while len(told.get(number, App()).called) < 1:
                    time.sleep(0.005)
                time.sleep(random.uniform(0.05, 1.2))
                killed_at[number] = time.monotonic()
                os.kill(children[number], signal.SIGKILL)

        hands = [
            threading.Thread(target=kill_some, args=(parent, list(range(scale.kills))[place :: len(parents)]))
            for place, parent in enumerate(parents)
        ]
        for hand in hands:
            hand.start()
        for hand in hands:
            hand.join()
        for parent in parents:
            assert parent.stdin is not None
            parent.stdin.close()
            parent.wait()
        for ear in ears:
            ear.join()
    store = open_store(f"sqlite:///{path}")
    problems = store.verify()
    store.close()
    with sqlite3.connect(path) as connection:
        found = {row[0] for row in connection.execute("SELECT trajectory_id FROM calls")}
    lost = unflushed = calls = 0
    oldest_ms: list[float] = []
    for number, app in told.items():
        missing = [place for place in app.called if f"{number}-{place}" not in found]
        calls += len(app.called)
        lost += sum(place <= app.acknowledged for place in missing)
        unflushed += len(missing)
        oldest_ms += [max((killed_at[number] - app.called[place]) * 1e3 for place in missing)] if missing else []
    return {
        "kills": len(killed_at),
        "killed_calls": calls,
        "corrupt": len(problems),
        "lost": lost,
        "unflushed": unflushed,
        "unflushed_ms_max": max(oldest_ms, default=0.0),
    }


# Queries.


def fill(store: Store, first: int, last: int, users: int) -> list[str]:
    """Write trajectories number `first` to `last`, and group them by eight; the last 2 % of groups wait for scores."""
    groups: list[str] = []
    for start in range(first, last, 80):
        runs = [small_run(number, users) for number in range(start, min(start + 80, last))]
        records: list[Record] = [record for run in runs for record in run]
        store.write(records)
        infos = [run[0] for run in runs]
        made: list[Group] = []
        for place in range(0, len(infos), 8):
            members = [Trajectory(info, ()) for info in infos[place : place + 8] if isinstance(info, TrajectoryInfo)]
            made.append(Group(new_id(), f"scenario-{start + place}", "same_task", tuple(members)))
        store.ledger.add_groups(made)
        groups += [group.id for group in made if len(group.trajectories) == 8]
        if start and start % 8_000 == 0:
            say(f"  {start * 10} calls")
    done = groups[: -max(1, len(groups) // 50)]
    for start in range(0, len(done), 500):
        store.ledger.set_groups(done[start : start + 500], "trained", policy="agent@2")
    return groups


def ask(store: Store, groups: list[str], times: int) -> dict[str, float]:
    took: dict[str, list[float]] = {"unscored_ms": [], "fetch_ms": []}
    clock = time.perf_counter
    for _ in range(times):
        group = random.choice(groups)
        start = clock()
        waiting = store.read.group_ids(state="formed", limit=100)
        took["unscored_ms"].append(clock() - start)
        start = clock()
        (whole,) = store.read.groups_of([group])
        took["fetch_ms"].append(clock() - start)
        assert waiting and len(whole.trajectories) == 8 and len(whole.trajectories[0].calls) == 10
    return {name: statistics.median(values) * 1e3 for name, values in took.items()}


def part_queries(scale: Scale, home: Path, url: str | None) -> Metrics:
    """Queries of a store that has grown, and erasing from it."""
    store = open_store(url or f"sqlite:///{home}/queries.db")
    trajectories = scale.calls // 10
    users = max(10, trajectories // 10)  # ten trajectories, a hundred calls each
    groups = fill(store, 0, trajectories // 10, users)
    ask(store, groups, 5)
    small = ask(store, groups, scale.asks)
    groups += fill(store, trajectories // 10, trajectories, users)
    ask(store, groups, 5)
    big = ask(store, groups, scale.asks)
    erased = erase(store)
    problems = store.verify() if scale.calls <= 100_000 else []
    store.close()
    return {
        **big,
        **{f"{name}_small": value for name, value in small.items()},
        "growth": max(big[name] / small[name] for name in big),
        "queries_calls": scale.calls,
        **erased,
        "queries_problems": len(problems),
    }


def erase(store: Store) -> Metrics:
    """Erase one user; see what it costs, and how long others had to wait."""
    database = store._database
    write, held_ms = database.write, list[float]()

    @contextmanager
    def timed(**how: bool) -> Iterator[Any]:
        start = 0.0
        try:
            with write(**how) as connection:
                start = time.perf_counter()
                yield connection
        finally:
            held_ms.append((time.perf_counter() - start) * 1e3)

    database.write = timed  # pyright: ignore[reportAttributeAccessIssue] - to see how long each transaction lasts
    start = time.perf_counter()
    erased = store.rights.erase(user="user-7")
    took = time.perf_counter() - start
    database.write = write
    return {"erase_s": took, "erase_chunk_ms_max": max(held_ms), "erased_calls": erased.calls}


def part_projects(scale: Scale, home: Path, _url: str | None) -> Metrics:
    """A project alone in its store, and one of a hundred of the same size."""
    alone = open_store(f"sqlite:///{home}/alone.db", project="project-50")
    groups = {alone: fill(alone, 0, RUNS, USERS)}
    for number in range(PROJECTS):
        store = open_store(f"sqlite:///{home}/shared.db", project=f"project-{number}")
        made = fill(store, 0, RUNS, USERS)
        if number == 50:
            groups[store] = made
        else:
            store.close()
    took: dict[Store, dict[str, list[float]]] = {store: {} for store in groups}

    def time_it(store: Store, name: str, run: Callable[[], object]) -> None:
        start = time.perf_counter()
        run()
        took[store].setdefault(name, []).append(time.perf_counter() - start)

    for turn in range(scale.asks + 5):
        for store in sorted(groups, key=id, reverse=bool(turn % 2)):  # they take turns at being first
            for name, value in ask(store, groups[store], 1).items():
                took[store].setdefault(name, []).append(value)
            time_it(
                store, "list_ms", lambda store=store: store.browse.summaries([key for _, key in store.browse.ids(ALL)])
            )
    for user in range(USERS):
        for store in sorted(groups, key=id, reverse=bool(user % 2)):
            time_it(store, "erase_s", lambda store=store, user=user: store.rights.erase(user=f"user-{user}"))
    one, many = ({name: statistics.median(values) for name, values in took[store].items()} for store in groups)
    ratios = {f"many_projects_{name.rpartition('_')[0]}": many[name] / one[name] for name in one}
    problems = [problem for store in groups for problem in store.verify()]
    for store in groups:
        store.close()
    return {**ratios, "many_projects_ratio": max(ratios.values()), "many_projects_problems": len(problems)}


PARTS: dict[str, Callable[[Scale, Path, str | None], Metrics]] = {
    "ingest": part_ingest,
    "size": part_size,
    "contention": part_contention,
    "kills": part_kills,
    "queries": part_queries,
    "projects": part_projects,
}


def run(scale: Scale, parts: list[str], url: str | None) -> Metrics:
    metrics: Metrics = {}
    for name in parts:
        say(f"{name}: {(PARTS[name].__doc__ or '').splitlines()[0]}")
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="art-patch-bench-") as home:
            metrics |= PARTS[name](scale, Path(home), url)
        say(f"  {time.monotonic() - began:.0f} s")
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object, last line of stdout")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="less than a minute")
    size.add_argument("--full", action="store_true", help="a million calls")
    parser.add_argument("--only", action="append", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--url", help="an empty PostgreSQL database for the part `queries`")
    given = parser.parse_args()
    random.seed(4)
    scale = QUICK if given.quick else FULL if given.full else USUAL
    metrics = run(scale, given.only or list(PARTS), given.url)
    finish(metrics, TARGETS, as_json=given.json)


if __name__ == "__main__":
    main()
