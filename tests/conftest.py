"""Metrics of all processes in one table at the end of the run; which files several processes begin with; threads.

Where each process takes whole files, the one that takes a long file last keeps everybody waiting: so files with many
slow tests come first.

What computes here computes with one thread, in processes that tests start as well, unless the environment says
otherwise. The models are so small that threads mostly wait for each other, and all the more while another process of
pytest computes on the same cores.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.support")  # before its first import: an assertion there shows its values, too

from tests.support.spooled import whenever_opened  # noqa: E402
from tests.support.statements import Watch  # noqa: E402
from tests.support.tiny import make_tiny_adapter, make_tiny_model  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, which reads it once

if find_spec("hypothesis"):  # not in the environments of other SDK versions
    from hypothesis import HealthCheck, settings

    # No test asserts a time, not even that of making up its examples. The same examples each time: what a commit did
    # not break does not fail it. With ART_PATCH_FULL they are new ones.
    settings.register_profile(
        "no luck",
        deadline=None,
        derandomize="ART_PATCH_FULL" not in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("no luck")


_JUDGING = {"Judge", "judge", "serve_stand_in_judge", "ruler", "ruler_score_group"}
"""A file that knows one of these, or a test with such a fixture, asks judges, and leaves litellm's clients behind."""
_LEAKED_SOCKET = "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest base: what is trained on it and served from it is made by each test."""
    return make_tiny_model(tmp_path_factory.mktemp("base"), hidden=32, vocab_size=320)


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger base, for which there are `adapters`."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, base_dir: Path) -> Path:
    """agent@1 to agent@4 of `base_dir`, all different."""
    root = tmp_path_factory.mktemp("adapters")
    for step in (1, 2, 3, 4):
        make_tiny_adapter(root, base_dir, "agent", step, seed=step)
    return root


@pytest.fixture(scope="session", autouse=True)
def statements() -> Iterator[Watch]:
    """Watches the statements of every store that a test of this process opens."""
    watch = Watch()
    watch.on()
    yield watch
    watch.off()


@pytest.fixture(scope="session", autouse=True)
def spooled() -> Iterator[None]:
    """Stores that tests open have what ended apps left."""
    with whenever_opened():
        yield


@pytest.fixture(autouse=True)
def each_statement_names_its_project(statements: Watch) -> Iterator[None]:
    """No statement may read or write rows of all projects; a thread that outlives its test is seen by the next one."""
    yield
    found, statements.found = statements.found, []
    assert not found, found


@pytest.fixture(scope="module", autouse=True)
def litellm_clients(request: pytest.FixtureRequest) -> Iterator[None]:
    """Be done with litellm's clients here, so that none is found in somebody else's test.

    It keeps a client for ten minutes and then drops it unclosed, and those at once that threads made side by side.
    """
    yield
    litellm: Any = sys.modules.get("litellm")
    if litellm is None or not _JUDGING & vars(request.module).keys():
        return
    litellm.in_memory_llm_clients_cache.flush_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest-xdist, which sorts files by how many tests they have, keep the order of the next function."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of pytest-xdist, put the files with most slow tests first, then those with most tests.

    Tests with the mark `full` are skipped unless they are asked for. In files that ask judges, sockets that litellm
    drops during a test are no failure.
    """
    for item in items:
        if item.get_closest_marker("full") and "ART_PATCH_FULL" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="takes long; ART_PATCH_FULL=1 runs it"))
        names = vars(getattr(item, "module", None) or object).keys() | set(getattr(item, "fixturenames", ()))
        if _JUDGING & names:
            item.add_marker(pytest.mark.filterwarnings(_LEAKED_SOCKET))
    if not hasattr(config, "workerinput"):
        return
    tests: Counter[Path] = Counter(item.path for item in items)
    slow: Counter[Path] = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-slow[item.path], -tests[item.path], item.path))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests recorded as `figure`: its name, what was measured, what was wanted."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    rows = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "figure"
    ]
    if not rows:
        return
    terminalreporter.section("metrics")
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, value, target in rows:
        terminalreporter.write_line(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {target}".rstrip())
