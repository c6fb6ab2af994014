"""What `art-patch web` costs: the time of its pages over a large store, its memory, and what apps pay for its readers.

::

    python tests/benchmarks/web.py [--json] [--calls 1000000] [--only pages browser live readers] [--databases sqlite]
                                   [--quick]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met. A million calls take about 15 minutes on two cores for each database, most of it to write
them. `--quick` repeats nothing often: it shows that all parts work, and times that mean little.

- `pages`: a server process over a store with so many calls, a tenth as many runs, groups, scores and 30 policies. Each
  page, its JSON, lists with filters and some searches are asked for again and again by one client on the same machine;
  what it waits is given, which is more than the server's own time. `page_ms_p95`: of all pages, the worst database;
  with the first request to each left out, since sums are then kept (`page_ms_first` has the longest of those).
  `search_ms_p95`, `rss_mib`: the server's memory at the end.
- `browser`: the first page in Chromium with an empty cache: `first_kib` over the wire, `first_ms` until its content is
  painted, `first_elsewhere` requests to other hosts.
- `live`: `live_ms`, the longest of some times between a call in the store and the page that shows it.
- `readers`: p50 of a recorded call of an app while ten readers follow the same store live, over that without, in turns
  (`readers_ratio`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402 - after the line above

from art_patch._lib.ids import new_id  # noqa: E402
from art_patch.settings import Settings, load_settings  # noqa: E402
from art_patch.store import Store, open_store  # noqa: E402
from art_patch.types import Group, Judgement, Policy, Score, Trajectory, TrajectoryInfo  # noqa: E402
from tests.benchmarks.samples import TEXT, small_run  # noqa: E402
from tests.benchmarks.stub import ASK  # noqa: E402
from tests.support.benchmark_report import Target, finish, percentile, say  # noqa: E402

TARGETS = (
    Target("page_ms_p95", None, 150, "a page or its JSON, p95, ms"),
    Target("search_ms_p95", None, 400, "a search, p95, ms"),
    Target("rss_mib", None, 200, "memory of the server, MiB"),
    Target("first_kib", None, 300, "first page in Chromium, all of it, KiB"),
    Target("first_ms", None, 500, "first page in Chromium until its content is painted, ms"),
    Target("first_elsewhere", None, 0, "requests of the first page to other hosts"),
    Target("live_ms", None, 2_000, "from a call in the store until it stands on an open page, longest, ms"),
    Target("readers_ratio", None, 1.05, "p50 of a recorded call with ten readers / without"),
)
CALLS_A_RUN = 10
AGE_S = 14 * 86_400.0


class Repeats(NamedTuple):
    """How often the parts repeat what they measure."""

    asks: int = 20
    lives: int = 8
    rounds: int = 10
    calls: int = 100  # of the app, in each round


QUICK = Repeats(3, 2, 1, 20)


# --- a large store ---


def fill(store: Store, calls: int, now: float) -> None:
    """Write runs of the last two weeks, grouped by eight, scored, with policies and judgements."""
    rng = random.Random(1)
    runs = calls // CALLS_A_RUN
    store.ledger.add_base("agent@0", "/base", "ff", who="benchmark", now=now - AGE_S)
    for step in range(1, 31):
        gate = {"difference": rng.gauss(0.05, 0.05), "candidate": 0.6, "champion": 0.55, "scenarios": 40}
        policy = Policy(
            f"agent@{step}",
            "/base",
            "ff",
            "candidate",
            now - AGE_S + step * 3_600,
            path="/none",
            parent=f"agent@{step - 1}",
            metrics={"gate": gate},
        )
        store.ledger.add_candidate(policy, trained_on=[], who="benchmark")
        store.ledger.move(
            policy.name,
            "champion" if step % 3 else "rejected",
            who="benchmark",
            reason="scores 0.600 against 0.550; proven better",
            now=now - AGE_S + step * 3_600 + 60,
        )
    groups: list[str] = []
    for start in range(0, runs, 80):
        numbers = range(start, min(start + 80, runs))
        made = [small_run(number, 10_000, began=now - AGE_S * (1 - number / runs)) for number in numbers]
        infos = [run[0] for run in made if isinstance(run[0], TrajectoryInfo)]
        grouped = [
            Group(
                new_id(),
                f"task:{start + place}",
                "same_task",
                tuple(Trajectory(i, ()) for i in infos[place : place + 8]),
            )
            for place in range(0, len(infos), 8)
        ]
        scores = [
            Score(
                new_id(),
                info.id,
                "ruler",
                rng.random(),
                "ruler",
                info.started_at + 60,
                comment="clear and short",
                group_id=group.id,
                rubric="r1",
                judge="judge",
            )
            for group in grouped
            for info in (each.info for each in group.trajectories)
        ]
        thumbs = [Score(new_id(), info.id, "thumbs", 1.0, "user", info.started_at + 90) for info in infos[::20]]
        store.write([record for run in made for record in run])
        store.ledger.add_groups(grouped, now=now)
        store.write([*scores, *thumbs])
        groups += [group.id for group in grouped]
        if start and start % 16_000 == 0:
            say(f"  {start * CALLS_A_RUN:,} calls")
    for key in groups[:2_000]:
        store.ledger.add_judgement(
            Judgement(new_id(), key, now - rng.random() * AGE_S, "judge", "r1", "score", "ok", calls=1, cost_usd=0.01)
        )
    for start in range(0, len(groups) - 200, 500):
        store.ledger.set_groups(groups[start : start + 500], "trained", policy=f"agent@{1 + start % 29}")
    store.search.extend(thorough=True)


# --- the server ---


class Running:
    """`art-patch web` as a process of its own, and a client that has entered."""

    def __init__(self, settings: Settings) -> None:
        """Start it and spend its link."""
        command = [
            sys.executable,
            "-m",
            "art_patch",
            "web",
            "--home",
            str(settings.home),
            "--project",
            settings.project,
        ]
        if settings.store:
            command += ["--store", settings.store]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--json", "--no-browser"], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        first = json.loads(self.process.stdout.readline() or '{"links": {}}')
        if not first["links"]:
            sys.exit("the server did not start")
        self.url: str = first["base_url"]
        self.link: str = next(iter(first["links"].values()))
        self.project = settings.project

    def client(self, **how: Any) -> httpx.Client:
        """A client with the link's cookie."""
        headers = {"origin": self.url}
        client = httpx.Client(base_url=self.url, headers=headers, timeout=120, follow_redirects=True, **how)
        assert client.post("/enter", data={"token": urlsplit(self.link).fragment}).status_code == 200
        return client

    def rss_mib(self) -> float:
        """Resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found[1]) / 1024 if found else float("nan")

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(30)


@contextmanager
def running(settings: Settings) -> Generator[Running]:
    """Run the server while the block runs."""
    server = Running(settings)
    try:
        yield server
    finally:
        server.stop()


# --- parts ---

# Lists with a filter: of those that no index answers, and those that match little.
LISTS = (
    "runs?user=user-9979", "runs?scenario=x", "runs?policy=agent@3", "runs?policy=upstream", "runs?model=gpt",
    "runs?tool=f", "runs?tag=a", "runs?min_reward=0.5", "runs?status=error", "runs?error=timeout",
    "runs?slower_than=2s", "runs?trainable=no", "runs?since=7d", "runs?sort=reward", "runs?sort=latency",
    "groups?state=trained", "groups?policy=agent@3", "review?kind=unsure", "system?before=50",
)  # fmt: skip


def paths_of(client: httpx.Client, base: str) -> list[str]:
    """All pages of the menu, and one page of each kind that they link to."""
    found = [""]
    found += sorted(set(re.findall(rf'href="{base}/([a-z]+)"', client.get(f"{base}/").text)))
    deeper: dict[str, str] = {}
    for path in found:
        for link in re.findall(rf'href="{base}/([a-z]+/[^"?#]+)"', client.get(f"{base}/{path}").text):
            deeper.setdefault(link.partition("/")[0], link)
    return [*found, *deeper.values()]


def pages(settings: Settings, repeats: Repeats) -> dict[str, Any]:
    """Ask for every page, and search."""
    took: dict[str, list[float]] = {}
    searched: list[float] = []
    first: dict[str, float] = {}
    rng = random.Random(2)
    words = sorted({word for word in re.findall(r"[a-z]{4,}", TEXT)})
    with running(settings) as server, closing(server.client()) as client:
        base = f"/p/{server.project}"
        paths = paths_of(client, base)
        asked = [*paths, *(LISTS if "runs" in paths else ())]
        for round_ in range(repeats.asks + 1):
            for path in asked:
                for address in (f"{base}/{path}", f"/api/v1/{server.project}/{path}".rstrip("/")):
                    began = time.perf_counter()
                    response = client.get(address)
                    ms = (time.perf_counter() - began) * 1e3
                    assert response.status_code == 200, (address, response.text[:300])
                    if round_ == 0:
                        first[address] = ms
                    else:
                        took.setdefault(path, []).append(ms)
        for _ in range(5 * repeats.asks if "runs" in paths else 0):
            began = time.perf_counter()
            response = client.get(f"{base}/runs", params={"search": rng.choice(words)})
            searched.append((time.perf_counter() - began) * 1e3)
            assert response.status_code == 200, response.text[:300]
        rss = server.rss_mib()
    for path, values in took.items():
        say(f"  /{path}: p50 {statistics.median(values):.0f} ms, p95 {percentile(values, 0.95):.0f} ms")
    return {
        "page_ms_p95": max(percentile(values, 0.95) for values in took.values()),
        "page_ms_first": max(first.values()),
        "pages": len(paths),
        "rss_mib": rss,
        **({"search_ms_p95": percentile(searched, 0.95)} if searched else {}),
    }


def browser(settings: Settings, _repeats: Repeats) -> dict[str, Any]:
    """The first page in Chromium, three times with an empty cache; the median of the times."""
    from tests.support.chromium import chromium

    sizes, times, elsewhere = list[float](), list[float](), 0
    with chromium() as launched:
        for _ in range(3):
            with running(settings) as server:
                context = launched.new_context()
                page = context.new_page()
                seen: list[Any] = []
                page.on("requestfinished", lambda asked, seen=seen: seen.append(asked))
                page.goto(server.link)
                page.wait_for_selector("h1:has-text('Overview')")
                page.wait_for_load_state("load")
                seen.clear()
                session = context.new_cdp_session(page)
                session.send("Network.clearBrowserCache")
                page.goto(f"{server.url}/p/{server.project}/", wait_until="load")
                paints = "performance.getEntriesByName('first-contentful-paint')"
                page.wait_for_function(f"() => {paints}.length > 0")
                times.append(float(page.evaluate(f"{paints}[0].startTime")))
                loaded = [each.sizes() for each in seen if "/live" not in each.url]
                sizes.append(sum(each["responseBodySize"] + each["responseHeadersSize"] for each in loaded) / 1024)
                elsewhere += sum(not each.url.startswith(server.url) for each in seen)
                context.close()
    return {"first_kib": max(sizes), "first_ms": statistics.median(times), "first_elsewhere": elsewhere}


def live(settings: Settings, repeats: Repeats) -> dict[str, Any]:
    """Write calls, and wait until the open page shows their number."""
    from tests.support.chromium import chromium

    waited: list[float] = []
    store = open_store(settings.store_url, project=settings.project)
    with closing(store), running(settings) as server, chromium() as launched:
        page = launched.new_page()
        page.goto(server.link)
        page.wait_for_selector("#live:has-text('Live')")
        calls = int(page.locator("[data-fact=Calls]").inner_text().replace(",", ""))
        for number in range(repeats.lives):
            time.sleep(1.5 + 0.3 * number)  # at different moments of the server's clock
            store.write(small_run(number, 10, began=time.time()))
            calls += CALLS_A_RUN
            began = time.perf_counter()
            page.wait_for_function(
                "want => document.querySelector('[data-fact=Calls]').textContent.replaceAll(',', '') == want",
                arg=str(calls),
            )
            waited.append((time.perf_counter() - began) * 1e3)
    return {"live_ms": max(waited), "live_ms_p50": statistics.median(waited)}


APP = """
import json, statistics, sys, time
import art_patch as art, openai
art.patch(mode="record")
client = openai.OpenAI(api_key="k", base_url=sys.argv[1], max_retries=0)
ask = json.loads(sys.argv[2])
for line in sys.stdin:
    took = []
    for _ in range(int(line)):
        began = time.perf_counter()
        client.chat.completions.create(**ask)
        took.append(time.perf_counter() - began)
        time.sleep(0.02)
    assert art.flush(60)
    print(statistics.median(took), flush=True)
"""


@contextmanager
def readers(server: Running, client: httpx.Client, count: int) -> Generator[None]:
    """So many open live streams; who reads one asks for the page again after an event, as a browser does."""
    stop, streams = threading.Event(), list[httpx.Response]()

    def read(stream: httpx.Response) -> None:
        with suppress(httpx.HTTPError, httpx.StreamError):
            for line in stream.iter_lines():
                if stop.is_set():
                    return
                if line.startswith("event:"):
                    client.get(f"/p/{server.project}/")

    with ExitStack() as stack:
        for _ in range(count):
            asked = client.build_request("GET", f"/p/{server.project}/live", timeout=None)
            streams.append(stream := client.send(asked, stream=True))
            stack.callback(stream.close)
            threading.Thread(target=read, args=(stream,), daemon=True).start()
        yield
        stop.set()


def added(home: Path, repeats: Repeats) -> dict[str, Any]:
    """Recorded calls with and without readers, in turns. The server runs all the time."""
    settings = load_settings(home=home, project="readers")
    took: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as stack:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "ART_PATCH_HOME": str(home)}
        stub = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.stub"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        stack.callback(stub.kill)
        assert stub.stdout is not None
        url = f"http://127.0.0.1:{stub.stdout.readline().strip()}/v1"
        app = subprocess.Popen(
            [sys.executable, "-c", APP, url, json.dumps(ASK)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"ART_PATCH_PROJECT": "readers"},
        )  # fmt: skip
        stack.callback(app.kill)

        def turn() -> float:
            assert app.stdin is not None
            assert app.stdout is not None
            app.stdin.write(f"{repeats.calls}\n")
            app.stdin.flush()
            return float(app.stdout.readline())

        turn()
        server = stack.enter_context(running(settings))
        limits = httpx.Limits(max_connections=100)
        client = stack.enter_context(closing(server.client(limits=limits)))
        for number in range(repeats.rounds):
            for watched in (True, False) if number % 2 else (False, True):
                with readers(server, client, 10) if watched else nullcontext():
                    time.sleep(1)
                    took[watched].append(turn())
    pairs = [a / b for a, b in zip(took[True], took[False], strict=True)]
    say(f"  ratios {', '.join(f'{each:.2f}' for each in pairs)}")
    return {"readers_ratio": statistics.median(pairs), "readers_call_us": statistics.median(took[False]) * 1e6}


def main() -> None:
    """Measure and print."""
    parts = ("pages", "browser", "live", "readers")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--databases", nargs="+", choices=("sqlite", "postgresql"), default=("sqlite", "postgresql"))
    parser.add_argument("--home", type=Path, help="keep the stores here, and use those that are there")
    parser.add_argument("--postgresql", help="URL of a database that is filled once and kept, in place of a new server")
    parser.add_argument("--quick", action="store_true", help="a few repetitions only")
    asked = parser.parse_args()
    repeats = QUICK if asked.quick else Repeats()
    metrics: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        home = (asked.home or Path(temporary)).absolute()
        if {"pages", "browser", "live"} & set(asked.only):
            metrics |= over_stores(home, asked, repeats)
        if "readers" in asked.only:
            metrics |= added(home, repeats)
    finish(metrics, TARGETS, as_json=asked.json)


def over_stores(home: Path, asked: argparse.Namespace, repeats: Repeats) -> dict[str, Any]:
    """Fill each database, and measure there; of each metric the worst."""
    metrics: dict[str, Any] = {"calls": asked.calls}
    for name in asked.databases:
        with ExitStack() as stack:
            url = asked.postgresql if name == "postgresql" else None
            if name == "postgresql" and url is None:
                from tests.support.postgres import new_server

                server = new_server()
                stack.callback(server.end)
                url = server.url(server.new_database())
            settings = load_settings(home=home, project=f"web-{name}", store=url)
            settings.directory.mkdir(parents=True, exist_ok=True)
            with closing(open_store(settings.store_url, project=settings.project)) as store:
                if store.changes.first_call_at() is None:
                    say(f"{name}: writing {asked.calls:,} calls")
                    fill(store, asked.calls, time.time())
            for part, measure in (("pages", pages), ("browser", browser), ("live", live)):
                if part not in asked.only or (part != "pages" and name != asked.databases[0]):
                    continue
                say(f"{name}: {part}")
                found = measure(settings, repeats)
                metrics |= {f"{key}_{name}": value for key, value in found.items()}
                metrics |= {key: max(value, metrics.get(key, 0)) for key, value in found.items()}
    return metrics


if __name__ == "__main__":
    main()
