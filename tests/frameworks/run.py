"""Every framework, oldest and newest release: is each call recorded once, or its bypass told with the cure?

    python tests/frameworks/run.py --json               # all: an hour at first, minutes once environments are made
    python tests/frameworks/run.py CrewAI DSPy          # some
    python tests/frameworks/run.py --write              # all, and the table of docs/pages/reference/frameworks.md

Each release is installed into an environment of its own, and its probe is run there against a local OpenAI-compatible
server that answers by rule. What the server was asked is compared, model by model (a model is a door of the framework),
with what is in the store. A door is `caught` (each call recorded once), `told` (not recorded, and the patch said so and
named the cure), `missed` or `double`; a framework is what its worst door in any release is. Exit code 1 if one is
`missed` or `double`, or if a probe fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from tests.frameworks.catalog import FRAMEWORKS, Framework  # noqa: E402
from tests.support.environments import environment, run_app  # noqa: E402
from tests.support.recorded import store_url, trajectories  # noqa: E402
from tests.support.replies import reply  # noqa: E402
from tests.support.servers import ReceivedRequest, serving  # noqa: E402

VERDICTS = ("caught", "told", "missed", "double")
"""From best to worst."""

BEGIN, END = "<!-- works with: written by tests/frameworks/run.py --write -->\n", "<!-- works with: end -->\n"


class Tried(NamedTuple):
    """A release of a framework.

    Attributes:
        version: of the framework's package.
        openai: of the SDK beside it.
        doors: verdict of each door, by its model's name without `gpt-`.
        steps: kinds of steps that the integration told of.
        problem: why there is no verdict.
    """

    version: str = ""
    openai: str = ""
    doors: Mapping[str, str] = MappingProxyType({})
    steps: tuple[str, ...] = ()
    problem: str = ""

    @property
    def verdict(self) -> str:
        """Of the worst door; what failed is missed."""
        return "missed" if self.problem else max(self.doors.values(), key=VERDICTS.index)


def try_release(framework: Framework, wanted: Sequence[str]) -> Tried:
    """Install a release and run its probe."""
    try:
        python = environment(framework.package, wanted)
        with tempfile.TemporaryDirectory() as folder, serving() as server:
            server.answer = reply
            url = store_url(Path(folder))
            told = run_app(python, f"probes/{framework.probe}_probe.py", url, server.url)
            asked = Counter(_door(seen.body["model"]) for seen in server.seen if _is_call(seen))
            found = trajectories(url)
    except (AssertionError, subprocess.SubprocessError, OSError) as error:
        return Tried(problem=str(error)[-2000:] or type(error).__name__)
    recorded = Counter(_door(call.requested_model) for each in found for call in each.calls)
    steps = tuple(sorted({span.kind for each in found for span in each.spans}))
    doors = judge(asked, recorded, told)
    empty = "" if doors else "The probe asked for nothing."
    problem = f"Faults of ours: {told['errors']}" if told["errors"] else empty
    return Tried(_version(python, framework.package), _version(python, "openai"), doors, steps, problem)


def judge(asked: Counter[str], recorded: Counter[str], told: Any) -> dict[str, str]:
    """Say of each door whether its calls were caught.

    Args:
        asked: calls that reached the server, by door.
        recorded: calls in the store, by door.
        told: what the probe printed; `bypasses` counts what went past, `warned` names the cures.
    """
    past = sum(told["bypasses"].values()) if any("went past" in line for line in told["warned"]) else 0
    past -= sum(told.get("recorded", {}).values())
    doors: dict[str, str] = {}
    for door in sorted(asked | recorded):
        if recorded[door] > asked[door]:
            doors[door] = "double"
        elif recorded[door] == asked[door]:
            doors[door] = "caught"
        else:
            missing = asked[door] - recorded[door]
            doors[door] = "told" if missing <= past else "missed"
            past -= missing
    return doors


def _is_call(seen: ReceivedRequest) -> bool:
    """Whether a request is not the SDK's own second try of one, as when a framework's client changes its loop."""
    return "model" in (seen.body or {}) and seen.headers.get("x-stainless-retry-count", "0") == "0"


def _door(model: str) -> str:
    return model.rpartition("/")[2].removeprefix("gpt-")


def _version(python: Path, package: str) -> str:
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    return subprocess.run([python, "-c", code, package], capture_output=True, text=True, check=True).stdout.strip()


def table(results: Iterable[tuple[Framework, Tried, Tried]]) -> str:
    """Return the table of the framework matrix."""
    lines = [
        "| framework | versions tested (with `openai`) | kinds of calls, all recorded | the integration adds "
        "| not recorded or not routed |",
        "|---|---|---|---|---|",
    ]
    for framework, oldest, newest in results:
        versions = ", ".join(f"{each.version} ({each.openai})" for each in (oldest, newest))
        doors = ", ".join(door for door, verdict in newest.doors.items() if verdict == "caught")
        lines.append(
            f"| {framework.name} | {versions} | {doors} | {framework.adds or '-'} | {framework.unseen or '-'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Try what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="frameworks; all unless given")
    parser.add_argument("--json", action="store_true", help="end with one line of metrics")
    parser.add_argument("--write", action="store_true", help="rewrite the framework matrix of the docs")
    given = parser.parse_args()
    known = {framework.name.lower(): framework for framework in FRAMEWORKS}
    unknown = [name for name in given.names if name.lower() not in known]
    if unknown or (given.write and given.names):
        parser.error(f"unknown: {unknown}; known: {sorted(known)}" if unknown else "--write needs all frameworks")
    chosen = [known[name.lower()] for name in given.names] or list(FRAMEWORKS)

    results: list[tuple[Framework, Tried, Tried]] = []
    for framework in chosen:
        with ThreadPoolExecutor(2) as pool:
            oldest, newest = pool.map(lambda wanted: try_release(framework, wanted), framework[3:5])  # noqa: B023
        results.append((framework, oldest, newest))
        for release in (oldest, newest):
            print(f"{framework.name} {release.version or '?'}, openai {release.openai or '?'}: {release.verdict}; "
                  f"{release.doors}; steps {list(release.steps)}; {release.problem}", flush=True)  # fmt: skip
    verdicts = Counter(max((old.verdict, new.verdict), key=VERDICTS.index) for _, old, new in results)
    if given.write:
        page = ROOT / "docs/pages/reference/frameworks.md"
        head, _, rest = page.read_text().partition(BEGIN)
        page.write_text(head + BEGIN + table(results) + END + rest.partition(END)[2])
    if given.json:
        print(json.dumps({"frameworks": len(results)} | {verdict: verdicts[verdict] for verdict in VERDICTS}))
    return int(bool(verdicts["missed"] or verdicts["double"]))


if __name__ == "__main__":
    sys.exit(main())
