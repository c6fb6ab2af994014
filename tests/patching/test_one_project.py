"""`patch()` has one project, and a project one home and store: a second is refused at once, and the first goes on.

`test_two_projects.py` has the clients that `wrap()` gave other projects.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

import art_patch as art
from art_patch.errors import ConfigError
from art_patch.store import open_store
from tests.support.sdk_samples import ASK


def recorded(home: Path) -> dict[str, int]:
    """How many calls each project of a home has."""
    assert art.flush(10)
    found = {}
    for path in home.glob("*/store.db"):
        store = open_store(f"sqlite:///{path}")
        found[path.parent.name] = store.read.counts()["calls"]
        store.close()
    return found


def patched(_client: Any, **settings: Any) -> None:
    art.patch(**settings)


def wrapped(client: Any, **settings: Any) -> None:
    art.wrap(client, **settings)


@pytest.fixture
def other(bench):
    with openai.OpenAI(api_key="k", base_url=bench.upstream.url, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("first", [patched, wrapped])
@pytest.mark.parametrize("second", [patched, wrapped])
@pytest.mark.parametrize("changed", ["project", "home", "store"])
def test_a_second_place_is_refused_and_the_first_goes_on(
    first: Callable[..., None],
    second: Callable[..., None],
    changed: str,
    bench,
    client,
    other,
    tmp_path: Path,
):
    if (second, changed) == (wrapped, "project"):
        return  # that is allowed
    given = {"project": "planner", "home": tmp_path, "mode": "record"}
    another = {"project": "writer", "home": tmp_path / "elsewhere", "store": f"sqlite:///{tmp_path}/another.db"}
    first(client, **given)
    status = art.status()
    with pytest.raises(ConfigError, match=r"one project.*unpatch\(\).*art-patch proxy --project"):
        second(other, **given | {changed: another[changed]})
    assert art.status() == status
    client.chat.completions.create(**ASK)
    other.chat.completions.create(**ASK)
    assert recorded(tmp_path) == {"planner": 2 if first is patched else 1}
    assert {path.name for path in tmp_path.iterdir()} == {"planner"}


def test_the_default_project_is_a_project(bench, client, other, tmp_path: Path):
    art.patch(home=tmp_path, mode="record")
    with pytest.raises(ConfigError, match=r"'default'.*'writer'"):
        art.patch(project="writer")
    client.chat.completions.create(**ASK)
    assert recorded(tmp_path) == {"default": 1}


def test_the_same_place_said_again_changes_nothing(bench, client, other, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    art.patch(project="planner", home=tmp_path, mode="record")
    art.patch()
    art.patch(project="planner", home=".")
    art.patch(store=f"sqlite:///{tmp_path}/planner/store.db")
    monkeypatch.chdir("/")
    art.patch()
    art.wrap(other, project="planner", mode="record")
    client.chat.completions.create(**ASK)
    other.chat.completions.create(**ASK)
    assert recorded(tmp_path) == {"planner": 2}


def test_after_unpatch_another_project_may_come(bench, client, tmp_path: Path):
    art.patch(project="planner", home=tmp_path, mode="record")
    client.chat.completions.create(**ASK)
    art.unpatch()
    art.patch(project="writer", home=tmp_path, mode="record")
    client.chat.completions.create(**ASK)
    assert recorded(tmp_path) == {"planner": 1, "writer": 1}


def test_other_settings_are_still_updated(bench, client, tmp_path: Path):
    art.patch(project="planner", home=tmp_path, mode="record")
    art.patch(project="planner", match="other-*")
    client.chat.completions.create(**ASK)
    assert recorded(tmp_path) == {}
    assert art.status().mode == "record"


def test_what_was_refused_is_not_patched_later(bench, client, other, tmp_path: Path):
    art.wrap(client, project="planner", home=tmp_path, mode="record")
    with pytest.raises(ConfigError):
        art.wrap(other, home=tmp_path / "elsewhere")
    art.wrap(client, project="planner")
    other.chat.completions.create(**ASK)
    assert recorded(tmp_path) == {}


APP = """
import openai
import art_patch as art
art.patch(project="writer", mode="record")
client = openai.OpenAI(api_key="k", base_url=__import__("sys").argv[1], max_retries=0)
client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
assert art.flush(10)
try:
    art.patch(project="third")
except art.errors.ConfigError as error:
    print(error)
"""


def test_an_apps_own_project_holds_under_run(bench, tmp_path: Path):
    """`art-patch run` sets variables, and arguments win over variables; from then on the process is that project's."""
    (tmp_path / "app.py").write_text(APP)
    command = [sys.executable, "-m", "art_patch", "run", "--project", "planner", "--home", str(tmp_path / "home")]
    done = subprocess.run(
        [*command, "--", sys.executable, str(tmp_path / "app.py"), bench.upstream.url], capture_output=True, text=True
    )
    assert (done.returncode, "'writer'" in done.stdout) == (0, True), done.stderr
    (line,) = done.stderr.splitlines()
    assert "'planner'" in line and "'writer'" in line
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["writer"]
