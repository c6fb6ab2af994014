"""`art-patch watch`, and what `art-patch serve` does by itself: in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.ids import new_id
from art_patch.policies import base_fingerprint
from art_patch.promotion.evidence import SETTLE_S
from art_patch.store import Store, open_store
from art_patch.types import Call, Choice, Policy, Score, TrajectoryInfo
from tests.support.command_line import warned, without_first_words
from tests.support.tiny import make_tiny_adapter

NEW, OLD = "agent@1", "agent@0"
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("ART_PATCH_")}


class Project:
    """A home with a candidate, its adapter, and no server."""

    def __init__(self, home: Path, base: Path) -> None:
        self.home = home
        self.store: Store = open_store(f"sqlite:///{home}/default/store.db")
        sha256 = base_fingerprint(base)
        self.store.ledger.add_base(OLD, str(base), sha256, who="test")
        path = make_tiny_adapter(home / "default" / "adapters", base)
        candidate = Policy(NEW, str(base), sha256, "candidate", 1.0, path=str(path), parent=OLD)
        self.store.ledger.add_candidate(candidate, trained_on=[], who="test")

    def sessions(
        self, asked: str, count: int, *, thumbs: float | None = None, ago_s: float = 0.0, **changes: Any
    ) -> None:
        records: list[Any] = []
        for _ in range(count):
            run, now = new_id(), time.time() - ago_s
            only = Choice(0, {"role": "assistant", "content": "three plums"}, "stop")
            values = {
                "id": new_id(), "trajectory_id": run, "started_at": now, "requested_model": "m", "choices": (only,),
                "messages": ({"role": "user", "content": "how many?"},), "policy": asked, "duration_ms": 50.0,
                "completion_tokens": 4,
            }  # fmt: skip
            records += [TrajectoryInfo(run, now, session_id=run), Call(**(values | changes))]
            if thumbs is not None:
                records.append(Score(new_id(), run, "thumbs", thumbs, "user", now))
        self.store.write(records)

    def art_patch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "art_patch", *arguments]
        environment = ENVIRONMENT | {"ART_PATCH_HOME": str(self.home)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    def state(self) -> str:
        policy = self.store.ledger.policy(NEW)
        assert policy is not None
        return policy.state


@pytest.fixture
def project(tmp_path: Path, base: Path) -> Iterator[Project]:
    found = Project(tmp_path, base)
    yield found
    found.store.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


FAILED = {"policy": None, "fallback": f"{NEW}: the engine answered HTTP 500"}


def test_one_look_tells_what_goes_on_and_what_came_of_it(project: Project):
    nothing = project.art_patch("watch", "--once")
    assert (nothing.returncode, nothing.stdout) == (0, "nothing to watch: no policy is tested beside the champion\n")

    project.store.ledger.move(NEW, "canary", who="test", reason="try it", percent=20, now=time.time() - 7_200)
    project.sessions(OLD, 4, ago_s=3_600)
    project.sessions(NEW, 1, ago_s=3_600)
    look = json.loads(project.art_patch("watch", "--once", "--json").stdout)
    left = look.pop("time_left")  # 5 sessions in 2 hours, and 19 more of a fifth of all
    assert (left["hours"], round(left["hours_at_least"]), round(left["hours_at_most"])) == (None, 38, 166)
    told = project.art_patch("watch", "--once").stdout
    assert "\ntime left: at least 38 h, until there are sessions enough; at most 7 d; nothing points" in told
    assert look | {"metrics": None} == {
        "outcome": "goes on", "reason": "1 sessions of its own, 4 of the champion's; 20 of each are needed",
        "challenger": NEW, "champion": OLD, "state": "canary", "percent": 20, "metrics": None,
    }  # fmt: skip
    assert look["metrics"]["champion"] == {"calls": 4, "sessions": 4, "failed": 0}

    project.sessions(OLD, 30, ago_s=3_600)
    project.sessions(NEW, 9, ago_s=1_800, **FAILED)
    looked = project.art_patch("watch", "--once")
    assert (looked.returncode, project.state()) == (0, "canary")
    assert "a running `art-patch serve` ends the test, and so does `art-patch watch --act`" in looked.stdout
    gone = project.art_patch("watch", "--once", "--act", "--who", "ada")
    assert gone.returncode == 4
    why = "its share of sessions with a failed call is worse: 0.900 against 0.000 in 10 sessions"
    assert gone.stdout.startswith(f"{NEW} rejected against {OLD}: {why}")
    assert [line.split()[0] for line in gone.stdout.splitlines()[-6:]] == [
        "reward", "feedback", "failed", "empty", "latency_ms", "ttft_ms",
    ]  # fmt: skip
    (failed,) = (line for line in gone.stdout.splitlines() if line.startswith("failed  ") and " of " in line)
    assert failed.split()[5:7] == ["of", "167"]
    assert (project.state(), project.store.ledger.history()[0]["who"]) == ("rejected", "ada (art-patch watch)")


@pytest.mark.slow
def test_a_server_looks_after_a_canary_by_itself(project: Project, base: Path, record_property):
    command = [sys.executable, "-m", "art_patch", "serve", "--base", str(base), "--port", "0", "--json"]
    soon = {"ART_PATCH_CANARY_REST_S": "1", "ART_PATCH_CANARY_SILENCE_S": "1"}
    environment = ENVIRONMENT | {"ART_PATCH_HOME": str(project.home)} | soon
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        assert json.loads(server.stdout.readline())["champion"] == OLD
        started = project.art_patch("promote", NEW, "--canary", "20", "--json")
        assert started.returncode == 0, started.stderr
        time.sleep(SETTLE_S)
        project.sessions(OLD, 40)
        project.sessions(NEW, 8, **FAILED)
        began = time.monotonic()
        wait_until(lambda: project.state() == "rejected")
        record_property("figure", ["a failing canary is rolled back, s", f"{time.monotonic() - began:.1f}", "<= 60"])

        project.store.ledger.add_candidate(_next(project), trained_on=[], who="test")
        make_tiny_adapter(project.home / "default" / "adapters", base, step=2, seed=2)
        started = project.art_patch("promote", "agent@2", "--canary", "20", "--json")
        assert started.returncode == 0, started.stderr
        time.sleep(SETTLE_S)
        for _ in range(40):
            project.sessions(OLD, 4, thumbs=0.0)
            project.sessions("agent@2", 1, thumbs=1.0)
        wait_until(lambda: project.store.ledger.route().champion == "agent@2")
        by = next(move["who"] for move in project.store.ledger.history() if move["to_state"] == "champion")
        assert by.endswith("(art-patch serve)")
    finally:
        server.terminate()
        _, stderr = server.communicate(timeout=30)
    assert server.returncode == 0
    assert without_first_words(stderr) == ""
    kinds = [
        line.split("art_patch.decisions: ")[1].split(":")[0] for line in stderr.splitlines() if "decisions" in line
    ]
    assert [kind for kind in kinds if kind != "decision"] == ["rejection", "promotion"]


def _next(project: Project) -> Policy:
    first = project.store.ledger.policy(NEW)
    assert first is not None and first.path is not None
    path = first.path.replace(NEW, "agent@2")
    return Policy("agent@2", first.base, first.base_sha256, "candidate", 2.0, path=path, parent=OLD)


def test_a_test_that_somebody_else_ends_is_told_as_it_ended(project: Project):
    project.store.ledger.move(NEW, "canary", who="test", reason="try it", percent=20)
    command = [sys.executable, "-m", "art_patch", "watch", "--every", "0.2", "--json"]
    environment = ENVIRONMENT | {"ART_PATCH_HOME": str(project.home)}
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert watching.stdout is not None
    first = json.loads(watching.stdout.readline())
    assert (first["outcome"], first["reason"]) == (
        "goes on",
        "the champion answered nothing meanwhile, so there is nothing to compare with",
    )
    project.store.ledger.move(NEW, "rejected", who="ada", reason="I do not like it")
    rest, stderr = watching.communicate(timeout=60)
    last = json.loads(rest.splitlines()[-1])
    assert (last["outcome"], last["reason"], last["challenger"]) == ("rejected", "I do not like it", NEW)
    assert (watching.returncode, warned(stderr)) == (4, "")
    assert f"rejection: {NEW} is rejected now, it was canary, by ada: I do not like it" in stderr
