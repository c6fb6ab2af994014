"""Applications of others, without the patch and with it: is what they print the same, and each call recorded?

    python tests/applications/run.py --json             # all, three runs each under the patch; an hour at first
    python tests/applications/run.py llm magentic       # some
    python tests/applications/run.py --busy             # beside two processes that take all the time they get

Each application is installed into an environment of its own and does its job against a local server that answers by
rule: twice without the patch, then three times with `art-patch run` in mode record, each with a new store. What the two
runs without the patch have in common (exit code, lines of stdout and stderr, requests) must be so with the patch too,
and where they are equal, nothing else may appear. The calls in the store must be those at the server; an application
that goes past the SDK must be told so. Ends with exit code 1 if one differs, loses calls or is not told.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from art_patch.types import Trajectory  # noqa: E402
from tests.applications.catalog import APPLICATIONS, KEY, Application  # noqa: E402
from tests.applications.upstream import Upstream, is_call, serving  # noqa: E402
from tests.support.environments import ENVIRONMENT, environment  # noqa: E402
from tests.support.recorded import trajectories  # noqa: E402

VARIES = (
    r"0x[0-9a-f]{6,}", r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}", r"127\.0\.0\.1:\d+",
    r"\d{4}-\d\d-\d\d[T :]\d\d:\d\d:\d\d[.,\d]*", r"\d+(\.\d+)? ?(ms|s|it/s|s/it|seconds)\b", r"\d\d:\d\d(:\d\d)?",
)  # fmt: skip
"""What differs between two runs of anything: addresses, ids, times."""


class Ran(NamedTuple):
    """What one run left.

    Attributes:
        returncode: exit code.
        output: lines of stdout and stderr, without what varies.
        asked: bodies of requests at the server, without what varies, and how often.
        calls: how many of them asked a model for text.
        told: what the patch said.
    """

    returncode: int
    output: Counter[str]
    asked: Counter[str]
    calls: int
    told: tuple[str, ...]


def run(application: Application, python: Path, server: Upstream, *, under: Sequence[str] = ()) -> Ran:
    """Let an application do its job in a directory that is new.

    Args:
        application: of the catalog.
        python: interpreter of its environment.
        server: that answers.
        under: command before its own.
    """
    server.reset()
    with tempfile.TemporaryDirectory(prefix="job") as folder:
        home = Path(folder)
        parts = {"{url}": server.url, "{host}": server.url.removesuffix("/v1"), "{home}": folder}

        def filled(text: str) -> str:
            return re.sub(r"\{(url|host|home)\}", lambda found: parts[found[0]], text)

        for name, text in application.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(filled(text))
        program, *arguments = map(filled, application.command)
        own = {key: filled(value) for key, value in application.variables.items()}
        fixed = {
            "HOME": folder, "TMPDIR": folder, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "OPENAI_API_KEY": KEY, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200", "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }  # fmt: skip
        done = subprocess.run(
            ["timeout", "120", *under, str(python.parent / program), *arguments],
            cwd=home, env=ENVIRONMENT | fixed | own, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        varies = re.compile("|".join((*VARIES, *application.varies, re.escape(folder))))
        lines = (done.stdout + done.stderr).splitlines()
        told = tuple(line for line in lines if line.startswith(("art_patch: ", "art-patch: ")))
        output = Counter(varies.sub("~", " ".join(line.split())) for line in lines if line not in told)
        asked = Counter(varies.sub("~", json.dumps([seen.path, seen.body], default=repr)) for seen in server.seen)
        return Ran(done.returncode, output, asked, sum(is_call(seen.path) for seen in server.seen), told)


class Verdict(NamedTuple):
    """What is known of an application after its runs."""

    name: str
    calls: int
    recorded: Sequence[int]
    problems: Sequence[str]
    told: Sequence[str]


def judge(application: Application, runs: int = 3) -> Verdict:
    """Run an application without and with the patch, and compare."""
    problems: list[str] = []
    recorded: list[int] = []
    python = environment(f"app-{application.requirements[0].partition('=')[0]}", list(application.requirements))
    with serving() as server:
        bare, again = run(application, python, server), run(application, python, server)
        if bare.returncode != application.returncode or not bare.calls:
            return Verdict(application.name, bare.calls, (), [f"without the patch: {bare}"], ())
        told: tuple[str, ...] = ()
        for _ in range(runs):
            patched, found = _under_the_patch(application, python, server)
            recorded.append(sum(len(each.calls) for each in found))
            if KEY in repr(found):
                problems.append("the store holds the provider's key")
            told = patched.told
            if patched.returncode != bare.returncode:
                problems.append(f"ends with {patched.returncode} instead of {bare.returncode}")
            problems += _differences("prints", bare.output, again.output, patched.output)
            problems += _differences("asks", bare.asked, again.asked, patched.asked)
            if application.past_sdk:
                if not patched.told:
                    problems.append("goes past the SDK and is not told so")
            elif recorded[-1] != patched.calls:
                problems.append(f"{recorded[-1]} of {patched.calls} calls recorded; {patched.told}")
            elif patched.told:
                problems.append(f"told: {patched.told}")
    return Verdict(application.name, bare.calls, recorded, problems, told)


def _differences(what: str, bare: Counter[str], again: Counter[str], patched: Counter[str]) -> list[str]:
    """What two runs without the patch have in common must be there; if they are equal, nothing else may be."""
    less, more = (bare & again) - patched, patched - bare if bare == again else Counter[str]()
    return [f"{what} otherwise: {sign} {text}" for sign, found in (("-", less), ("+", more)) for text in found]


def _under_the_patch(application: Application, python: Path, server: Upstream) -> tuple[Ran, list[Trajectory]]:
    """Run it in mode record with a new store; returns also what is in the store."""
    with tempfile.TemporaryDirectory(prefix="store") as home:
        options = ["--mode", "record", "--home", home, "--project", "p"]
        patched = run(application, python, server, under=[str(python), "-m", "art_patch", "run", *options, "--"])
        store = Path(home) / "p/store.db"
        left = store.exists() or store.with_name("store.db-spool").exists()
        return patched, trajectories(f"sqlite:///{store}") if left else []


@contextmanager
def busy(processes: int) -> Generator[None]:
    """Processes that take all the time they get."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="how names of applications begin; all unless given")
    parser.add_argument("--busy", action="store_true", help="beside two processes that take all the time they get")
    parser.add_argument("--runs", type=int, default=3, help="runs with the patch")
    parser.add_argument("--json", action="store_true", help="end with one line of metrics")
    given = parser.parse_args()
    chosen = [each for each in APPLICATIONS if not given.names or each.name.startswith(tuple(given.names))]
    verdicts: list[Verdict] = []
    with busy(2 if given.busy else 0):
        for application in chosen:
            verdict = judge(application, given.runs)
            verdicts.append(verdict)
            recorded = list(verdict.recorded)
            print(f"{verdict.name}: {verdict.calls} calls, recorded {recorded}, {list(verdict.told)}", flush=True)
            for problem in verdict.problems:
                print(f"    {problem[:4000]}", flush=True)
    bad = sum(bool(verdict.problems) for verdict in verdicts)
    if given.json:
        both = list(zip(chosen, verdicts, strict=True))
        metrics = {
            "applications": len(both),
            "bad": bad,
            "sent": sum(verdict.calls * len(verdict.recorded) for each, verdict in both if not each.past_sdk),
            "recorded": sum(sum(verdict.recorded) for each, verdict in both if not each.past_sdk),
            "past_sdk": sum(each.past_sdk for each in chosen),
            "told": sum(bool(verdict.told) for each, verdict in both if each.past_sdk),
        }
        print(json.dumps(metrics))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
