"""Promotions under load, exact log-probabilities, boots and restarts: `art-patch serve` as apps and the job see it.

::

    python tests/benchmarks/hot_swap.py [--engine vllm | embedded] [--json] [--quick] [--only PART]...

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met; without it, a table. Minutes. vLLM is the one that `art-patch init vllm` built, or that
`ART_PATCH_VLLM_PYTHON` names.

How it is measured:

- The engine is `art-patch serve` in a process of its own, with a random Qwen3 of 0.15 M parameters and random LoRAs
  that differ from the first token on. Callers are patched OpenAI clients in threads of this process; the promotions are
  those of the job, through the ledger.
- `requests`, `failed`, `mixed`: 12 clients stream answers of 48 tokens, greedily, while the champion is replaced every
  2 s. An answer is mixed if it is not, token by token, the one that the policy it names gives when nothing else
  happens: each policy is its own marker. Nobody is there to fall back to, so a call that cannot be answered fails.
- `p99_ratio`: of whole answers, stretches with promotions / stretches without, which take turns.
- `logprob_max_diff`: of every trainable call that was recorded, at temperatures 0.7 and 1, streamed and whole, with
  tools and with several choices: the largest difference from what the trainer's own code computes for the same ids.
- `boot_s`: from the start of `art-patch serve` to the first token of a LoRA. vLLM imports itself in two processes, one
  after the other; `vllm_import_s` is one of them, measured between the boots. `restart_s`: from a `kill -9` of the
  engine's server process to the first answer of the champion, while 8 clients call, streaming or not, with an upstream
  to fall back to. `restart_errors` counts their exceptions; `restart_cut_streams` counts streams of which the caller
  had read something when the process died: nobody can splice those.
- `bad_*`: adapters that are broken in one way each (those of `tests/policies/test_validation.py`): how many were
  accepted,
  how many vLLM's log names, whether the champion answers as before.
- `orphans`: processes left 5 s after a `kill -9`, for each kind of process in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import openai  # noqa: E402 - the line above makes ours importable

import art_patch as art  # noqa: E402
from art_patch._lib.key_files import admin_key  # noqa: E402
from art_patch.errors import AdapterRejected  # noqa: E402
from art_patch.policies import base_fingerprint, publish_adapter  # noqa: E402
from art_patch.promotion import promote  # noqa: E402
from art_patch.serving import EngineClient  # noqa: E402
from art_patch.serving.vllm.environment import find_vllm  # noqa: E402
from art_patch.serving.vllm.process import marked  # noqa: E402
from art_patch.settings import load_settings  # noqa: E402
from art_patch.store import Store, open_store  # noqa: E402
from art_patch.types import Policy  # noqa: E402
from tests.support.benchmark_report import Target, finish, percentile, say  # noqa: E402
from tests.support.broken_adapters import AFTER_PUBLISHING, BEFORE_PUBLISHING  # noqa: E402
from tests.support.servers import serving as serve_upstream  # noqa: E402
from tests.support.tiny import make_adapter_files, make_tiny_adapter, make_tiny_model  # noqa: E402

Metrics = dict[str, Any]

TARGETS = (
    Target("failed", None, 0, "answers that failed, 12 clients"),
    Target("mixed", None, 0, "answers that no single policy gives"),
    Target("p99_ratio", None, 1.2, "latency p99 with promotions / without"),
    Target("logprob_max_diff", None, 1e-4, "trainer - engine, nats, float32"),
    Target("bad_accepted", None, 0, "bad adapters that were loaded"),
    Target("bad_seen_by_vllm", None, 0, "bad adapters that vLLM heard of"),
    Target("boot_s", None, 20, "start to the first token of a LoRA, s"),
    Target("restart_s", None, 30, "kill -9 to the champion's first answer, s"),
    Target("restart_errors", None, 0, "callers' exceptions meanwhile"),
    Target("orphans", None, 0, "processes left after a kill -9"),
)

CLIENTS, TOKENS = 12, 48
EVERY_S = 2.0
QUESTION: list[Any] = [{"role": "user", "content": "which one are you?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "lookup", "description": "Look up", "parameters": {"type": "object", "properties": {}}},
}


class World:
    """A project with a base and many policies, and its engine."""

    def __init__(self, home: Path, engine: str, steps: int) -> None:
        self.home, self.engine, self.steps = home, engine, steps
        self.base = make_tiny_model(home / "base")
        self.directory = home / "bench"
        for step in range(1, steps + 1):
            make_tiny_adapter(self.directory / "adapters", self.base, "agent", step, seed=step)
        self.store: Store = open_store(f"sqlite:///{self.directory}/store.db")
        sha256 = base_fingerprint(self.base)
        self.store.ledger.add_base("agent@0", str(self.base), sha256, who="bench")
        for step in range(1, steps + 1):
            name = f"agent@{step}"
            path = str(self.directory / "adapters" / name)
            candidate = Policy(name, str(self.base), sha256, "candidate", time.time(), path=path, parent="agent@0")
            self.store.ledger.add_candidate(candidate, trained_on=[], who="bench")
        self.store.ledger.move("agent@1", "champion", who="bench", reason="bench")

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[str]]:
        """`art-patch serve`, until the block ends."""
        command = [sys.executable, "-m", "art_patch", "serve", "--engine", self.engine, "--base", str(self.base)]
        command += ["--home", str(self.home), "--project", "bench", "--port", "0", "--threads", "1", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            self.url: str = json.loads(process.stdout.readline())["base_url"]
            yield process
        finally:
            process.terminate()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    @property
    def vllm_home(self) -> Path:
        return self.directory / "vllm"


@contextmanager
def patched(world: World, upstream: str) -> Iterator[openai.OpenAI]:
    """A client of an app."""
    art.patch(project="bench", home=world.home, mode="route", poll_interval_s=0.5, first_token_timeout_s=10)
    with openai.OpenAI(api_key="none", base_url=upstream, max_retries=0, timeout=60) as client:
        yield client
    art.unpatch()


NOWHERE = "http://127.0.0.1:9/v1"


def stream_ids(client: openai.OpenAI) -> tuple[str, tuple[int, ...]]:
    """Which policy answered, and its tokens."""
    policy, ids = "", list[int]()
    for chunk in client.chat.completions.create(
        model="gpt", messages=QUESTION, max_tokens=TOKENS, temperature=0, stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ):  # fmt: skip
        policy = chunk.system_fingerprint or policy
        for choice in chunk.choices:
            ids += choice.to_dict().get("token_ids") or []
    return policy, tuple(ids)


def alone(engine: EngineClient, name: str) -> tuple[int, ...]:
    """What a policy answers when nothing else happens."""
    answer = engine.chat(
        model=name, messages=QUESTION, max_tokens=TOKENS, temperature=0, return_token_ids=True, ignore_eos=True
    )
    return tuple(answer["choices"][0]["token_ids"])


def part_swaps(world: World, quick: bool) -> Metrics:
    """Promotions under load."""
    promotions = 4 if quick else 16
    answers: list[tuple[str, tuple[int, ...]]] = []
    took: dict[bool, list[float]] = {True: [], False: []}
    failures: list[str] = []
    stop, swapping = threading.Event(), threading.Event()
    with (
        world.serving(),
        EngineClient(world.url, admin_key=admin_key(world.directory)) as engine,
        patched(world, NOWHERE) as client,
    ):
        expected = {"agent@1": alone(engine, "agent@1")}
        for step in range(2, promotions + 2):  # a few at a time: an engine holds no more
            engine.load(f"agent@{step}")
            expected[f"agent@{step}"] = alone(engine, f"agent@{step}")
            engine.unload(f"agent@{step}")
        assert len(set(expected.values())) == len(expected), "every policy must answer differently"
        wait_for_route(client)

        def talk() -> None:
            while not stop.is_set():
                at, began = swapping.is_set(), time.perf_counter()
                try:
                    answers.append(stream_ids(client))
                except Exception as error:
                    failures.append(f"{type(error).__name__}: {error}")
                    continue
                if at == swapping.is_set():
                    took[at].append((time.perf_counter() - began) * 1e3)

        threads = [threading.Thread(target=talk) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        time.sleep(2)  # whatever is cold gets warm
        took[False].clear()
        each = 4
        for first in range(2, promotions + 2, each):
            time.sleep(each * EVERY_S)
            swapping.set()
            for step in range(first, first + each):
                due = time.monotonic() + EVERY_S
                promote(world.store.ledger, engine, f"agent@{step}", who="bench", reason="bench")
                time.sleep(max(0.0, due - time.monotonic()))
            swapping.clear()
            say(f"  {first + each - 2} of {promotions} promotions, {len(answers)} answers, {len(failures)} failures")
        time.sleep(each * EVERY_S)
        stop.set()
        for thread in threads:
            thread.join()
    for failure in sorted(set(failures))[:3]:
        say(f"  {failure[:300]}")
    mixed = sum(expected.get(policy) != ids for policy, ids in answers)
    p99 = {at: percentile(times, 0.99) for at, times in took.items()}
    return {
        "promotions": promotions,
        "requests": len(answers) + len(failures),
        "failed": len(failures),
        "mixed": mixed,
        "policies_seen": len({policy for policy, _ in answers}),
        "p50_ms": statistics.median(took[False]),
        "p50_ms_promoting": statistics.median(took[True]),
        "p99_ms": p99[False],
        "p99_ms_promoting": p99[True],
        "p99_ratio": p99[True] / p99[False],
    }


def wait_for_route(client: openai.OpenAI) -> None:
    deadline = time.monotonic() + 30
    while True:
        with suppress(openai.OpenAIError):
            if stream_ids(client)[0]:
                return
        if time.monotonic() > deadline:
            raise SystemExit("the champion does not answer")
        time.sleep(0.2)


def part_exact(world: World, quick: bool) -> Metrics:
    """The trainer's log-probabilities."""
    import torch

    from art_patch.training import Example, TrainConfig
    from art_patch.training.data.packing import packs_of
    from art_patch.training.data.rows import rows_and_report
    from art_patch.training.loop.loading import load_policy
    from art_patch.training.scoring import Scorer

    torch.set_num_threads(1)
    rounds = 5 if quick else 25
    champion = world.store.ledger.champion()
    assert champion is not None
    assert champion.path is not None
    keys = [f"exact-{number}" for number in range(rounds * 8)]
    with world.serving(), patched(world, NOWHERE) as client:
        wait_for_route(client)

        def call(number: int) -> None:
            options: dict[str, Any] = {"temperature": random.choice([None, 0.7, 1.0]), "max_tokens": 64}
            options |= {"tools": [TOOL]} if number % 3 == 0 else {}
            options |= {"n": 3} if number % 4 == 1 else {}
            options = {name: value for name, value in options.items() if value is not None}
            messages: list[Any] = [{"role": "user", "content": "tell me " * (1 + number % 40)}]
            with art.trajectory(id=keys[number]):
                if number % 2:
                    client.chat.completions.create(model="gpt", messages=messages, **options)
                else:
                    list(client.chat.completions.create(model="gpt", messages=messages, stream=True, **options))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(len(keys))))
        art.flush(10)
    found = world.store.read.trajectories(keys)
    calls = [call for trajectory in found for call in trajectory.calls]
    examples = [Example(rows) for trajectory in found if (rows := rows_and_report(trajectory, max_tokens=4096)[0])]
    scorer = Scorer(load_policy(str(world.base), Path(champion.path), TrainConfig()))
    largest, tokens = 0.0, 0
    with torch.no_grad():
        for pack in packs_of(examples, 8192):
            logprob_N = scorer.score(pack).logprob_N.cpu()
            largest = max(largest, (logprob_N - torch.from_numpy(pack.recorded_N)).abs().max().item())
            tokens += len(logprob_N)
    return {
        "exact_calls": len(calls),
        "exact_untrainable": sum(call.untrainable is not None for call in calls),
        "exact_tokens": tokens,
        "logprob_max_diff": largest,
    }


def part_boot(world: World, quick: bool) -> Metrics:
    """Boots."""
    times: list[float] = []
    imports: list[float] = []
    for _ in range(1 if quick else 3):
        if world.engine == "vllm":
            began = time.monotonic()
            subprocess.run([vllm_python(), "-c", "import vllm.entrypoints.openai.api_server"], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
            imports.append(time.monotonic() - began)
        began = time.monotonic()
        with world.serving(), EngineClient(world.url, admin_key=admin_key(world.directory)) as engine:
            champion = world.store.ledger.champion()
            assert champion is not None
            engine.chat(model=champion.name, messages=QUESTION, max_tokens=1)
            times.append(time.monotonic() - began)
        say(f"  boot {times[-1]:.1f} s")
    metrics = {"boot_s": statistics.median(times), "boot_s_max": max(times)}
    if imports:
        metrics["vllm_import_s"] = statistics.median(imports)
    return metrics


def vllm_python() -> Path:
    settings = load_settings()
    found = find_vllm(settings.vllm_python, settings.environments)
    if found is None:
        raise SystemExit("there is no vLLM; run: art-patch init vllm")
    return found.python


def part_restart(world: World, quick: bool) -> Metrics:
    """A kill -9 under load."""
    stop, killed_at = threading.Event(), 0.0
    errors: list[str] = []
    cut: list[str] = []
    counts = {"upstream": 0, "champion": 0}
    back: list[float] = []
    with serve_upstream() as upstream, world.serving() as server, patched(world, upstream.url) as client:
        wait_for_route(client)
        champion = world.store.ledger.champion()
        assert champion is not None

        def talk(stream: bool) -> None:
            while not stop.is_set():
                begun = False
                began = time.monotonic()
                try:
                    if stream:
                        policy = None
                        for chunk in client.chat.completions.create(
                            model="gpt", messages=QUESTION, max_tokens=TOKENS, stream=True
                        ):
                            begun, policy = True, chunk.system_fingerprint or policy
                    else:
                        policy = client.chat.completions.create(
                            model="gpt", messages=QUESTION, max_tokens=TOKENS
                        ).system_fingerprint
                except Exception as error:
                    (cut if begun else errors).append(f"{type(error).__name__}: {error}")
                    continue
                ours = policy == champion.name
                counts["champion" if ours else "upstream"] += 1
                if ours and killed_at and began > killed_at + 0.5:
                    back.append(time.monotonic())
                time.sleep(0.02)

        threads = [threading.Thread(target=talk, args=(number % 2 == 0,)) for number in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(3)
        victims = processes(world.vllm_home, "openai.api_server") or [server.pid]
        killed_at = time.monotonic()
        os.kill(victims[0], signal.SIGKILL)
        deadline = time.monotonic() + 120
        while len(back) < 20 and time.monotonic() < deadline:
            time.sleep(0.1)
        stop.set()
        for thread in threads:
            thread.join()
    for error in sorted(set(errors))[:3]:
        say(f"  {error[:300]}")
    return {
        "restart_s": min(back) - killed_at if back else float("inf"),
        "restart_errors": len(errors),
        "restart_cut_streams": len(cut),
        "restart_from_upstream": counts["upstream"],
        "restart_from_champion": counts["champion"],
    }


def processes(home: Path, part: str) -> list[int]:
    """Those of a vLLM whose command line holds this."""
    found: list[int] = []
    for pid in marked(home):
        with suppress(OSError):
            if part.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def part_orphans(world: World, quick: bool) -> Metrics:
    """What a kill -9 leaves."""
    left: dict[str, int] = {}
    for victim in ("art-patch", "group_guard.py", "openai.api_server", "EngineCore"):
        with world.serving() as server:
            before = set(marked(world.vllm_home))
            victims = [server.pid] if victim == "art-patch" else processes(world.vllm_home, victim)
            if not victims:
                raise SystemExit(f"no process {victim} was found")
            os.kill(victims[0], signal.SIGKILL)
            time.sleep(5)
            left[victim] = len(before & set(marked(world.vllm_home)))
        say(f"  {victim}: {left[victim]} of {len(before)} left")
    return {"orphans": sum(left.values()), "orphans_by_victim": left}


def part_bad(world: World, quick: bool) -> Metrics:
    """Adapters that must not be loaded."""
    cases = [(spoil, True) for spoil, _ in BEFORE_PUBLISHING.values()]
    cases += [(spoil, False) for spoil, _ in AFTER_PUBLISHING.values()]
    sha256, adapters = base_fingerprint(world.base), world.directory / "adapters"
    refused, reasons = 0, set[str]()
    with world.serving(), EngineClient(world.url, admin_key=admin_key(world.directory)) as engine:
        served = engine.models()
        newest = served[-1]  # promotions have unloaded the older ones
        before = alone(engine, newest)
        for step, (spoil, early) in enumerate(cases, start=1000):
            work = make_adapter_files(adapters / f"work{step}", world.base)
            if early:
                spoil(work)
            final = publish_adapter(work, adapters / f"bad@{step}", base_sha256=sha256)
            if not early:
                spoil(final)
                for left in ("elsewhere", "real"):  # where some of them move a file to
                    with suppress(FileNotFoundError):
                        (adapters / left).rename(adapters / f"{left}{step}")
            try:
                engine.load(f"bad@{step}")
            except AdapterRejected as error:
                refused += 1
                reasons.add(str(error).partition(": ")[2])
        untouched = engine.models() == served and alone(engine, newest) == before
    log = world.vllm_home / "vllm-0.log"
    return {
        "bad_adapters": len(cases),
        "bad_accepted": len(cases) - refused,
        "bad_reasons": len(reasons),
        "bad_seen_by_vllm": log.read_text().count("bad@") if log.exists() else 0,
        "bad_serving_touched": int(not untouched),
    }


PARTS: dict[str, Callable[[World, bool], Metrics]] = {
    "boot": part_boot,
    "swaps": part_swaps,
    "exact": part_exact,
    "bad": part_bad,
    "restart": part_restart,
    "orphans": part_orphans,
}
ONLY_VLLM = ("restart", "orphans")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm")
    parser.add_argument("--json", action="store_true", help="one JSON object, last line of stdout")
    parser.add_argument("--quick", action="store_true", help="fewer promotions and calls")
    parser.add_argument("--only", action="append", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    given = parser.parse_args()
    random.seed(5)
    chosen = given.only or [name for name in PARTS if given.engine == "vllm" or name not in ONLY_VLLM]
    metrics: Metrics = {"engine": given.engine}
    with tempfile.TemporaryDirectory(prefix="art-patch-bench-") as directory:
        world = World(Path(directory), given.engine, steps=17)
        for name in chosen:
            say(f"{name}: {PARTS[name].__doc__}")
            metrics |= PARTS[name](world, given.quick)
        world.store.close()
    finish(metrics, TARGETS, as_json=given.json)


if __name__ == "__main__":
    main()
