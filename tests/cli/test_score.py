"""`art-patch score` as a user runs it, against a judge on a real socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from art_patch.demo.judge import serve_stand_in_judge
from art_patch.store import open_store
from art_patch.types import Call, Choice, Group, Score, Trajectory, TrajectoryInfo

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("ART_PATCH_")}
GROUPS = 5


def count_of_x(messages: list[dict[str, Any]]) -> float:
    """What the answer is worth; whatever is planted among the siblings is worth nothing."""
    said = str(messages[-1]["content"])
    return len(said) / 2 if set(said) <= {"x"} else 0.0


@pytest.fixture
def asked() -> list[list[dict[str, Any]]]:
    """Transcripts that reached the judge."""
    return []


@pytest.fixture
def judge(asked: list[list[dict[str, Any]]]) -> Iterator[str]:
    def rule(messages: list[dict[str, Any]]) -> float:
        asked.append(messages)
        return count_of_x(messages)

    with serve_stand_in_judge(rule) as url:
        yield url


class Refusing(BaseHTTPRequestHandler):
    """A judge whose provider knows no such key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps(
            {"error": {"message": "your key\x1b]0;owned\x07 has expired", "type": "invalid_request_error"}}
        ).encode()
        self.send_response(401)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serve_refusals() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Groups g0 to g4 of three siblings wait; a user rewarded all of g4; g5 is held out."""
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    groups: list[Group] = []
    for number in range(GROUPS + 1):
        siblings: list[Trajectory] = []
        for run in range(3):
            key = f"t{number}-{run}"
            answer = Choice(0, {"role": "assistant", "content": "x" * run}, "stop")
            call = Call(f"{key}-c", key, 1.0, "m", ({"role": "user", "content": f"question {number}"},), (answer,))
            siblings.append(Trajectory(TrajectoryInfo(key, 1.0), (call,)))
            store.write([siblings[-1].info, call])
            if number == GROUPS - 1:
                store.write([Score(f"s-{key}", key, "reward", 1.0, "user", 1.0)])
        groups.append(Group(f"g{number}", f"task:{number}", "same_task", tuple(siblings), held_out=number == GROUPS))
    store.ledger.add_groups(groups)
    store.close()
    return tmp_path


def score(home: Path, *arguments: str, judge: str | None = None) -> subprocess.CompletedProcess[str]:
    where = [] if judge is None else ["--judge", "openai/some-judge", "--judge-base-url", judge]
    return subprocess.run(
        [sys.executable, "-m", "art_patch", "score", "--home", str(home), *where, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )


@pytest.mark.slow
def test_scores_are_kept_as_they_come_and_a_second_run_goes_on(
    home: Path, judge: str, asked: list[list[dict[str, Any]]]
) -> None:
    first = score(home, "--max-calls", "5", "--json", judge=judge)  # two are spent on planted answers
    assert first.returncode == 0, first.stderr
    done = json.loads(first.stdout)["score"]
    assert (done["calls"], done["planted_answers_caught"], done["cost_usd"]) == (5, 2, None)
    assert done["groups"] + done["unscored"] == 5
    assert all("budget used up: 5 of 5 calls were made" in reason for reason in done["reasons"])

    second = score(home, judge=judge)
    assert second.returncode == 0, second.stderr
    assert f"scored {done['unscored']} of {done['unscored']} groups" in second.stdout
    assert "an unknown price" in second.stdout
    store = open_store(f"sqlite:///{home}/default/store.db")
    scored = store.read.groups(state="scored")
    assert {group.id for group in scored} == {f"g{number}" for number in range(GROUPS)}
    for group in scored:
        for trajectory in group.trajectories:
            values = {one.name: one.value for one in trajectory.scores}
            assert values == ({"reward": 1.0} if group.id == "g4" else {"ruler": int(trajectory.id[-1]) / 2})
    assert store.read.groups(state="formed")[0].held_out
    store.close()
    assert not any("question 5" in str(messages) for messages in asked)


@pytest.mark.slow
@pytest.mark.parametrize("max_calls", ["1", "3", "100"])
def test_a_judge_that_refuses_every_call_is_an_error_within_any_budget(home: Path, max_calls: str) -> None:
    with serve_refusals() as url:
        done = score(home, "--max-calls", max_calls, judge=url)
    assert (done.returncode, done.stdout) == (7, "")
    assert "the judge openai/some-judge" in done.stderr
    assert "your key\\x1b]0;owned\\x07 has expired" in done.stderr and "\x1b" not in done.stderr
    store = open_store(f"sqlite:///{home}/default/store.db")
    assert len(store.read.groups(state="formed", held_out=False)) == GROUPS  # nothing was lost
    store.close()


@pytest.mark.slow
def test_a_dry_run_shows_what_would_be_sent_and_sends_nothing(
    home: Path, judge: str, asked: list[list[dict[str, Any]]]
) -> None:
    unknown = score(home, "--dry-run", "--json", judge=judge)
    assert unknown.returncode == 0, unknown.stderr
    plan = json.loads(unknown.stdout)
    assert (plan["sent"], plan["judge"], plan["base_url"]) == (False, "openai/some-judge", judge)
    assert (plan["calls"], plan["checking_calls"], plan["estimate_usd"]) == (4, 3, None)
    assert sum(group["prompt_tokens"][0] for group in plan["groups"]) == plan["prompt_tokens"] > 1_000
    assert [group["id"] for group in plan["groups"]] == ["g0", "g1", "g2", "g3"]
    members = sum(group["attempts"] for group in plan["groups"])
    assert (plan["runs"], plan["answers"], plan["tool_results"]) == (members, members, 0)
    assert plan["characters"] > 3_000 and plan["embeddings"] is None and plan["redact"] is None
    assert "prompts" not in plan

    priced = score(home, "--dry-run", "--show", "--judge", "openai/gpt-5-mini", "--rubric", "Be brief, and be right.")
    assert priced.returncode == 0, priced.stderr
    assert "nothing was sent" in priced.stdout and "about $0.00" in priced.stdout
    assert "Be brief, and be right." in priced.stdout and "question 0" in priced.stdout
    assert "question 1" not in priced.stdout
    assert "redaction here: none (ART_PATCH_REDACT), at least 0 of the runs were redacted" in priced.stdout
    assert "judge openai/gpt-5-mini at its provider's own address" in priced.stdout

    assert asked == []
    store = open_store(f"sqlite:///{home}/default/store.db")
    assert len(store.read.groups(state="formed", held_out=False)) == GROUPS
    store.close()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 7, "no judge is configured"),
        (("--judge", "openai/x", "--show"), 2, "give it with --dry-run"),
        (("--judge", "openai/x", "--max-calls", "-1"), 2, "0 or more"),
        (("--judge", "openai/x", "--rubric", "no-such-file"), 2, "cannot be read"),
    ],
    ids=["no judge", "show alone", "impossible limit", "no rubric"],
)
def test_what_is_wrong_is_said(home: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    result = score(home, *arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert words in result.stderr


def test_a_limit_in_money_on_a_judge_without_a_price_is_refused(home: Path, judge: str) -> None:
    result = score(home, "--max-usd", "1", "--json", judge=judge)
    assert result.returncode == 7
    assert "--max-calls" in json.loads(result.stdout)["message"]
