"""What the patch costs an app, beside what four instrumentations cost it, in one interleaved run.

::

    python tests/benchmarks/patch_overhead.py [--json] [--quick] [--only PART]...

Needs `pip install "art-patch[bench]"`. Progress goes to stderr; with `--json` the last line of stdout is one object of
named metrics, with `missed` listing the targets that were not met; without it, a table. About five minutes; `--quick`
takes less than one and is good for finding out whether something broke, not for metrics.

How it is measured. All variants talk to one stub server, in a process of its own, that sends bytes made beforehand.
Each variant lives in one worker process (instrumentations patch globally), and each worker makes bare and patched
calls in turns, by taking the variant's functions off the SDK's classes and putting them on again. The workers take
turns too, in random order, 25 calls at a time, so that what else the machine does hits all alike.

- `*_us_p50`, `*_cpu_us`, `*_ttft_added_us`, `*_chunk_added_us`: the median over all pairs of neighbouring blocks of
  (median of the patched block - median of the bare block); a ratio is the median of the pairs' quotients. CPU is the
  calling thread's. A routed call reads a bigger answer (token ids, log-probabilities) than the bare one it is compared
  with; that is part of what routing costs.
- `*_us_p99`: p99 of all patched calls - p99 of all bare calls, from stretches of 300 calls back to back, long enough
  for the writer thread to convert and write while the app goes on calling: 1,000 calls a second from one thread, far
  more than an agent makes.
- `streams_1000_added_cpu_pct`: 1,000 streams open at once on one event loop; CPU of the whole process, the writer
  thread's parsing and writing included. `streams_1000_added_loop_cpu_pct` is the event loop's thread alone.
- `async_10000_*`: 10,000 calls gathered; `rss` is the peak of the process, importing the store included.
- `import_ms`, `patch_ms`: in fresh interpreters, after `import openai`.

Each worker says at its end how many of its patched calls the variant has seen; if that is not all of them, "patched"
was not patched and the run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks import variants  # noqa: E402 - the line above makes it importable

Metrics = dict[str, float]

US = 1e6


class Target(NamedTuple):
    """A figure and what it must not exceed."""

    figure: str
    limit: float
    means: str


TARGETS = (
    Target("record_added_us_p50", 25, "added by recording one call, us"),
    Target("record_ratio", 1.03, "recorded / bare call"),
    Target("record_added_us_p99", 1000, "added by recording, p99, us"),
    Target("route_added_us_p50", 40, "added by routing one call, us"),
    Target("route_ratio", 1.05, "routed / bare call"),
    Target("route_added_us_p99", 1000, "added by routing, p99, us"),
    Target("ttft_added_us", 40, "added to the first token, recording, us"),
    Target("ttft_added_us_route", 40, "added to the first token, routing, us"),
    Target("chunk_added_us", 1, "added to a chunk, recording, us"),
    Target("chunk_added_us_stripped", 8, "added to a chunk, token ids stripped, us"),
    Target("cpu_vs_openinference", 0.1, "the app thread's CPU, recording / openinference"),
    Target("streams_1000_added_cpu_pct", 5, "1,000 streams on one loop, added CPU of the process, %"),
    Target("third_party_imports_at_import", 0, "modules that `import art_patch` brings, not of the standard library"),
    Target("patch_ms", 50, "`art.patch()`, ms"),
    Target("async_10000_errors", 0, "10,000 calls at once: errors"),
    Target("async_10000_wall_ratio", 1.1, "10,000 calls at once: wall time, recorded / bare"),
    Target("async_10000_rss_added_mib", 64, "10,000 calls at once: added peak memory, MiB"),
)


class Scale(NamedTuple):
    """How much of everything is run."""

    call_rounds: int
    stream_rounds: int
    stretches: int
    loop_rounds: int
    crowd: int
    crowd_pairs: int
    starts: int


FULL = Scale(call_rounds=80, stream_rounds=40, stretches=8, loop_rounds=3, crowd=10_000, crowd_pairs=2, starts=7)
QUICK = Scale(call_rounds=6, stream_rounds=4, stretches=1, loop_rounds=1, crowd=1_000, crowd_pairs=1, starts=2)

CALLS_A_BLOCK = 25
STREAMS_A_BLOCK = 4
CALLS_A_STRETCH = 300


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def python(*args: str, **more: Any) -> subprocess.Popen[str]:
    """A Python process that finds this folder and speaks in lines."""
    return subprocess.Popen(
        [sys.executable, *args], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more
    )


def last_line(*args: str, **more: Any) -> Any:
    """What a Python process prints last, as JSON."""
    done = subprocess.run([sys.executable, *args], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, **more)
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def stub() -> Iterator[str]:
    """The address of a running stub server."""
    with python("-m", "tests.benchmarks.stub") as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.communicate()


class Worker:
    """A variant's process."""

    def __init__(self, variant: str, url: str, home: str) -> None:
        self.variant = variant
        self.process = python("-m", "tests.benchmarks.worker", variant, url, home)

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker of {self.variant} has died; see above")
        return json.loads(line)

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> None:
        """Stop, and check that every patched call was one."""
        told = self.ask(do="end")
        self.process.communicate()
        if told["seen"] not in (told["made"], -1):
            raise SystemExit(f"{self.variant} has seen {told['seen']} of {told['made']} patched calls")


class Bench:
    """What the parts share: the stub, a directory, the scale, and the workers once somebody wants them."""

    def __init__(self, url: str, home: Path, scale: Scale) -> None:
        self.url = url
        self.home = home
        self.scale = scale
        self._workers: list[Worker] = []

    @property
    def workers(self) -> list[Worker]:
        """One for each variant, ready."""
        if not self._workers:
            self._workers = [Worker(name, self.url, str(self.home / name)) for name in variants.VARIANTS]
            for worker in self._workers:
                worker.read()
        return self._workers

    def end_workers(self) -> None:
        """Stop them and check what they did."""
        while self._workers:
            self._workers.pop().end()

    def kill_workers(self) -> None:
        for worker in self._workers:
            worker.process.kill()


Pairs = dict[str, list[dict[str, Any]]]


def interleave(running: Sequence[Worker], do: str, n: int, rounds: int) -> Pairs:
    """Let the workers take turns; return each one's pairs of blocks."""
    pairs: Pairs = {worker.variant: [] for worker in running}
    for number in range(rounds):
        for worker in random.sample(running, len(running)):
            pairs[worker.variant].append(worker.ask(do=do, n=n, bare_first=random.random() < 0.5))
        if (number + 1) % 10 == 0:
            say(f"  {do}: {number + 1} of {rounds} rounds")
    return pairs


Value = Callable[[dict[str, Any]], float]


def typical(name: str) -> Value:
    """The median of one of a block's lists."""
    return lambda block: statistics.median(block[name])


def added(pairs: list[dict[str, Any]], value: Value) -> float:
    """What a patched block has more than its neighbour."""
    return statistics.median(value(pair["patched"]) - value(pair["bare"]) for pair in pairs)


def ratio(pairs: list[dict[str, Any]], value: Value) -> float:
    return statistics.median(value(pair["patched"]) / value(pair["bare"]) for pair in pairs)


def p99(pairs: list[dict[str, Any]], name: str) -> float:
    return statistics.quantiles([time for pair in pairs for time in pair[name]["wall"]], n=100)[-1]


# The parts. Each returns metrics.


def part_calls(bench: Bench) -> Metrics:
    """Calls that are not streamed."""
    metrics: Metrics = {}
    pairs = interleave(bench.workers, "calls", CALLS_A_BLOCK, bench.scale.call_rounds)
    ours = [worker for worker in bench.workers if worker.variant in variants.OURS]
    stretches = interleave(ours, "calls", CALLS_A_STRETCH, bench.scale.stretches)
    bare = [pair["bare"] for found in pairs.values() for pair in found]
    metrics["bare_us_p50"] = statistics.median(map(typical("wall"), bare)) * US
    for name, found in pairs.items():
        metrics[f"{name}_added_us_p50"] = added(found, typical("wall")) * US
        metrics[f"{name}_ratio"] = ratio(found, typical("wall"))
        metrics[f"{name}_cpu_us"] = added(found, lambda block: block["cpu"]) * US
    for name, found in stretches.items():
        metrics[f"{name}_added_us_p99"] = (p99(found, "patched") - p99(found, "bare")) * US
        metrics[f"{name}_sustained_added_us_p50"] = added(found, typical("wall")) * US
    metrics["cpu_vs_openinference"] = metrics["record_cpu_us"] / metrics["openinference_cpu_us"]
    return metrics


def part_streams(bench: Bench) -> Metrics:
    """Streams, one after the other."""
    pairs = interleave(bench.workers, "streams", STREAMS_A_BLOCK, bench.scale.stream_rounds)
    bare = [pair["bare"] for found in pairs.values() for pair in found]
    metrics: Metrics = {
        "bare_ttft_us": statistics.median(map(typical("first"), bare)) * US,
        "bare_chunk_us": statistics.median(map(typical("chunk"), bare)) * US,
    }
    names = {"record": ("ttft_added_us", "chunk_added_us"), "route": ("ttft_added_us_route", "chunk_added_us_stripped")}
    for name, found in pairs.items():
        first, chunk = names.get(name, (f"{name}_ttft_added_us", f"{name}_chunk_added_us"))
        metrics[first] = added(found, typical("first")) * US
        metrics[chunk] = added(found, typical("chunk")) * US
    return metrics


def part_loop(bench: Bench) -> Metrics:
    """Streams, very many at once."""
    n = "1000"
    home, rounds = str(bench.home / "loop"), str(bench.scale.loop_rounds)
    told = last_line("-m", "tests.benchmarks.crowd", "streams", bench.url, home, n, rounds)
    process, thread = ([statistics.median(turn[at] for turn in told[name]) for name in told] for at in (0, 1))
    return {
        "streams_1000_bare_cpu_s": process[0],
        "streams_1000_added_cpu_pct": (process[1] / process[0] - 1) * 100,
        "streams_1000_added_loop_cpu_pct": (thread[1] / thread[0] - 1) * 100,
    }


def part_gather(bench: Bench) -> Metrics:
    """Calls, very many at once."""
    told: dict[str, list[dict[str, float]]] = {"bare": [], "record": []}
    for number in range(bench.scale.crowd_pairs):
        for name in ("bare", "record") if number % 2 else ("record", "bare"):
            home, crowd = str(bench.home / f"gather{number}"), str(bench.scale.crowd)
            run = last_line("-m", "tests.benchmarks.crowd", "calls", bench.url, home, crowd, name)
            told[name].append(run)
            say(f"  {crowd} calls at once, {name}: {run['wall_s']:.1f} s")

    def middle(name: str, key: str) -> float:
        return statistics.median(run[key] for run in told[name])

    return {
        "async_10000_calls": bench.scale.crowd,
        "async_10000_errors": sum(run["errors"] for runs in told.values() for run in runs),
        "async_10000_wall_ratio": middle("record", "wall_s") / middle("bare", "wall_s"),
        "async_10000_rss_added_mib": middle("record", "peak_mib") - middle("bare", "peak_mib"),
    }


_START = """
import json, sys, time
import openai
before, clock = set(sys.modules), time.perf_counter
start = clock()
import art_patch as art
imported = clock() - start
brought = {name.partition(".")[0] for name in set(sys.modules) - before}
start = clock()
art.patch(home=sys.argv[1])
patched = clock() - start
third = sorted(brought - sys.stdlib_module_names - {"art_patch"})
print(json.dumps({"import_ms": imported * 1e3, "patch_ms": patched * 1e3, "third": third}))
"""


def part_start(bench: Bench) -> Metrics:
    """Importing and patching."""
    # Compiled beforehand, as an installed package is; the first process compiles and is not counted.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bench.home / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = ("-c", _START, str(bench.home / "start"))
    told = [last_line(*start, env=environment) for _ in range(bench.scale.starts + 1)][1:]
    return {
        "import_ms": statistics.median(run["import_ms"] for run in told),
        "third_party_imports_at_import": max(len(run["third"]) for run in told),
        "patch_ms": statistics.median(run["patch_ms"] for run in told),
    }


PARTS = {"start": part_start, "calls": part_calls, "streams": part_streams, "loop": part_loop, "gather": part_gather}


def missed(metrics: Metrics) -> list[str]:
    return [target.figure for target in TARGETS if metrics.get(target.figure, 0) > target.limit]


def show(metrics: Metrics) -> None:
    """Print the metrics as tables."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console()
    table = Table(Column("figure", no_wrap=True), "", "measured", "target", "", title="art_patch")
    for target in TARGETS:
        if target.figure in metrics:
            value = metrics[target.figure]
            verdict = "ok" if value <= target.limit else "[red]miss[/red]"
            table.add_row(target.figure, target.means, f"{value:.6g}", f"<= {target.limit:g}", verdict)
    console.print(table)
    columns = {
        "p50, us": "added_us_p50",
        "ratio": "ratio",
        "CPU, us": "cpu_us",
        "first token, us": "ttft_added_us",
        "chunk, us": "chunk_added_us",
    }
    table = Table("added by", *columns, title="beside others")
    ours = {
        "record": {"ttft_added_us": "ttft_added_us", "chunk_added_us": "chunk_added_us"},
        "route": {"ttft_added_us": "ttft_added_us_route", "chunk_added_us": "chunk_added_us_stripped"},
    }
    for name in variants.VARIANTS:
        keys = [ours.get(name, {}).get(column, f"{name}_{column}") for column in columns.values()]
        table.add_row(name, *(f"{metrics[key]:.4g}" if key in metrics else "" for key in keys))
    console.print(table)
    named = {target.figure for target in TARGETS}
    for name, value in metrics.items():
        if name not in named and not name.startswith(variants.VARIANTS):
            console.print(f"{name} = {value:.6g}", highlight=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="less than a minute; rough")
    parser.add_argument("--only", action="append", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    args = parser.parse_args(argv)
    if absent := variants.missing():
        raise SystemExit(f'not installed: {", ".join(absent)}; run: pip install "art-patch[bench]"')
    metrics: Metrics = {}
    with ExitStack() as stack:
        url, home = stack.enter_context(stub()), stack.enter_context(tempfile.TemporaryDirectory())
        bench = Bench(url, Path(home), QUICK if args.quick else FULL)
        stack.callback(bench.kill_workers)
        for name in args.only or PARTS:
            start = time.perf_counter()
            say(f"{name}: {(PARTS[name].__doc__ or '').rstrip('.').lower()}")
            metrics |= PARTS[name](bench)
            say(f"  {time.perf_counter() - start:.0f} s")
        bench.end_workers()
    if args.json:
        print(json.dumps({name: round(value, 4) for name, value in metrics.items()} | {"missed": missed(metrics)}))
    else:
        show(metrics)


if __name__ == "__main__":
    main()
