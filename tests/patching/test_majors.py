"""The tests that look at the SDK, run for each of its majors in a virtual environment of that major's own.

An environment holds one openai, what art_patch and these tests need besides, and art_patch from this source tree. It is
made once and kept in pytest's cache, under a hash of what was asked for. What this interpreter has of it is copied, and
uv, which has the last word, fetches the rest. In each the tests run twice: as installed, where the other HTTP library
must not be importable, and the call shapes once more with that one beside.

Two environments are worked on at a time. What was run, with which versions, and what was skipped why is printed in the
end.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.environments import ENVIRONMENT, ROOT, copy_installed, create_venv, say, site_of, tail

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SHAPES = "tests/patching/test_shapes.py"
FILES = (
    SHAPES,
    *(
        f"tests/patching/test_{name}.py"
        for name in ("bypass", "completions", "fallback", "responses", "stream_ends", "switching", "transparency")
    ),
)
TESTERS = ("hypothesis", "pytest", "pytest-timeout")
AT_A_TIME = 2


@dataclass(frozen=True)
class Major:
    """One major of the SDK.

    Attributes:
        openai: what is asked for.
        own: the HTTP library that it brings.
        other: the one that it does not.
    """

    openai: str
    own: str
    other: str


MAJORS = {
    "1.66": Major("openai[realtime]==1.66.*", "httpx", "httpx2"),
    "1": Major("openai[aiohttp,realtime]>=1.109,<2", "httpx", "httpx2"),
    "2": Major("openai[aiohttp,realtime]>=2,<3", "httpx", "httpx2"),
    "3": Major("openai[aiohttp,realtime]>=3,<4", "httpx2", "httpx"),
}


@dataclass(frozen=True)
class Run:
    """One run of pytest.

    Attributes:
        name: environment.
        versions: of the SDK and both HTTP libraries; `None` where one is not installed.
        code: exit status.
        output: everything it said.
        seconds: how long it took.
    """

    name: str
    versions: dict[str, str | None]
    code: int
    output: str
    seconds: float

    def count(self, what: str) -> int:
        """How many tests `passed`, `skipped` or `failed`."""
        found = re.search(rf"(\d+) {what}", self.output.rstrip().rpartition("\n")[2])
        return int(found[1]) if found else 0

    @property
    def skips(self) -> list[str]:
        """The reasons, each with how many tests it kept from running."""
        return [f"{count} x {why}" for count, why in re.findall(r"^SKIPPED \[(\d+)\] \S+ (.*)", self.output, re.M)]

    @property
    def rows(self) -> list[list[str]]:
        """Its rows of the table at the end of the run: what became of it, and what was skipped why."""
        versions = ", ".join(f"{name} {self.versions[name] or '-'}" for name in ("openai", "httpx", "httpx2"))
        failed = self.count("failed") + self.count("error")
        metrics = f"{self.count('passed')} passed, {failed} failed, {self.count('skipped')} skipped"
        whole = [f"major {self.name}: {versions}", metrics, f"{self.seconds:.0f} s"]
        return [whole, *([f"major {self.name}: skipped", "", skip] for skip in self.skips)]


def requirements(major: Major) -> list[str]:
    """What goes into an environment: the project's own words, but for openai."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [line for line in project["dependencies"] if not line.startswith("openai")]
    testers = [line for line in project["optional-dependencies"]["test"] if re.split(r"[<>=!~]", line)[0] in TESTERS]
    return [major.openai, *needed, *testers]


def environment(major: Major, folder: Path) -> Path:
    """Return the directory of a major's environment; make it if it is not there yet."""
    wanted = requirements(major)
    key = hashlib.sha256("\n".join([sys.version, major.other, *wanted]).encode()).hexdigest()[:16]
    place = folder / key
    if not (place / "made").exists():
        shutil.rmtree(place, ignore_errors=True)
        install = create_venv(place)
        copy_installed(wanted, site_of(place), but=("openai", major.other))
        say([*install, *wanted], env=ENVIRONMENT)
        if not copy_installed([major.other], place / "other"):
            shutil.rmtree(place / "other", ignore_errors=True)
            say([*install, "--target", place / "other", major.other], env=ENVIRONMENT)
        (place / "made").touch()
    (site_of(place) / "art_patch.pth").write_text(f"{ROOT}\n{ROOT / 'integrations'}\n")
    return place


def work_on(name: str, major: Major, folder: Path) -> list[Run]:
    """Make the environment and run the tests in it, without the other HTTP library and with it."""
    place = environment(major, folder)
    beside = ENVIRONMENT | {"PYTHONPATH": str(place / "other")}
    return [
        run_tests(name, place, ENVIRONMENT, FILES),
        run_tests(f"{name} + {major.other}", place, beside, (SHAPES,)),
    ]


VERSIONS = """
import importlib.metadata, importlib.util, json
names = ("openai", "httpx", "httpx2")
found = {name: importlib.util.find_spec(name) and importlib.metadata.version(name) for name in names}
print(json.dumps(found))
"""


def run_tests(name: str, place: Path, variables: dict[str, str], files: tuple[str, ...]) -> Run:
    python = place / "bin/python"
    versions = json.loads(say([python, "-c", VERSIONS], env=variables).stdout)
    # Properties of pure functions are the same on every major.
    options = ["-q", "-ra", "--tb=short", "-p", "no:cacheprovider", "-m", "not hypothesis and not slow"]
    began = time.monotonic()
    done = subprocess.run(
        [python, "-m", "pytest", *options, *files],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=variables,
        timeout=900,
    )
    return Run(name, versions, done.returncode, done.stdout, time.monotonic() - began)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[list[Run]]]]:
    """The runs of the majors that are asked for, in the background."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("majors") if cache else request.getfixturevalue("tmp_path_factory").mktemp("majors")
    items = [item for item in request.session.items if item.path == request.path]
    asked = [item for item in items if not item.get_closest_marker("skip")]
    wanted = [item.callspec.params["name"] for item in asked if hasattr(item, "callspec")]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = {name: pool.submit(work_on, name, MAJORS[name], Path(folder)) for name in wanted}
        yield found


# The oldest and the newest in each run; those between them are more of the same.
@pytest.mark.parametrize("name", ["1.66", *(pytest.param(name, marks=pytest.mark.full) for name in ("1", "2")), "3"])
def test_major(runs, name, record_property):
    alone, beside = runs[name].result()
    for row in (*alone.rows, *beside.rows):
        record_property("figure", row)
    major = MAJORS[name]
    assert alone.versions["openai"].startswith(name)
    assert alone.versions[major.own] is not None
    assert alone.versions[major.other] is None
    assert None not in beside.versions.values()
    for run in (alone, beside):
        assert run.code == 0, f"{run.name}\n{tail(run.output)}"
        assert run.count("passed") > 300
    assert not any(f"{major.other} is not installed" in skip for skip in beside.skips)
