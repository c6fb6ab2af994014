"""The page "From day 1 to production" is true: its commands run in order, in one project, and what it promises holds.

One app runs from the first step to the last over a provider on this machine. The base is the smallest, and a rule
stands in for the judge. Weeks take a minute here: runs count as ended at once, and the gate needs few scenarios.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.demo.judge import serve_stand_in_judge
from art_patch.errors import ArtPatchError
from tests.support.command_line import ENVIRONMENT
from tests.support.cycles import is_foreign
from tests.support.docs_pages import ROOT, Block, blocks_of, commands
from tests.support.next_release import next_release
from tests.support.servers import TEXT, StubServer, serving

PAGE = ROOT / "docs/pages/how-to/day-one-to-production.md"
PROVIDERS = "".join(TEXT)
LISTEN = """
import json, sys
for line in sys.stdin:
    said = json.loads(line)
    print(json.dumps(reply(*said) if isinstance(said, list) else exec(said)), flush=True)
"""
CRONTAB = """#!/bin/sh
table="$(dirname "$0")/table"
case "$1" in -l) cat "$table" ;; -) cat >"$table" ;; esac
"""
LESS = {
    "ART_PATCH_RESAMPLE": "3", "ART_PATCH_RESAMPLE_MAX": "24", "ART_PATCH_GATE_SCENARIOS": "3", "OMP_NUM_THREADS": "1",
    "COLUMNS": "300", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "k",
}  # fmt: skip
FOLLOWED_S = 3.0
"""A running app follows within half a second; a busy machine may take longer."""
MORE = {"serve": ["--port", "0"], "retrain": ["--settle-s", "0"]}


def steps() -> dict[int, list[Block]]:
    """The page's blocks by the number of their step."""
    lines = PAGE.read_text().splitlines()
    begins = {int(head[1]): at for at, line in enumerate(lines, 1) if (head := re.match(r"## (\d+)\. ", line))}
    found: dict[int, list[Block]] = {number: [] for number in begins}
    for block in blocks_of(PAGE):
        found[max(number for number, at in begins.items() if at < block.line)].append(block)
    return found


def eventually(holds: Callable[[], Any], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


class Days:
    """The project, and who works on it: the app, the server, and the person at the command line."""

    def __init__(self, directory: Path, base: Path, upstream: StubServer, environment: pytest.MonkeyPatch) -> None:
        self.directory, self.base, self.upstream, self.environment = directory, base, upstream, environment
        self.project = directory / "home/support-bot"
        self.processes: list[subprocess.Popen[str]] = []
        self.said, self.code, self.asked = "", 0, 0

    # --- what a step has: the agent, and commands ---

    def python(self, code: str) -> None:
        code = code.replace("max_tokens=300", "max_tokens=12")
        if self.processes:
            assert self._tell(code) is None
        else:
            (self.directory / "bot.py").write_text(code + LISTEN)
            self._start([sys.executable, "bot.py"])
            assert self._heard() == PROVIDERS + "\n"

    def command(self, words: list[str]) -> None:
        if words[0] == "export":
            self.environment.setenv(*words[1].split("=", 1))
            return
        assert words[0] == "art-patch", words
        learner = self.learner if "agent@1" in words else ""
        replaced = {"Qwen/Qwen2.5-3B-Instruct": str(self.base), "agent@1": learner}
        words = [replaced.get(word, word) for word in words[1:]] + MORE.get(words[1], [])
        if words[0] == "serve":
            self.said = ""
            self._start([sys.executable, "-m", "art_patch", *words])
            while "the engine is at" not in self.said:
                self.said += (line := self._heard())
                assert line, "the server ended"
            return
        done = CliRunner().invoke(app, words)
        failed = done.exception
        assert failed is None or isinstance(failed, ArtPatchError | SystemExit), (words, done.output, repr(failed))
        self.code = failed.exit_code if isinstance(failed, ArtPatchError) else done.exit_code
        self.said = done.output
        assert self.code == 0 or words[0] == "retrain", (words, self.code, self.said, repr(failed))

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
            process.communicate(timeout=60)

    def _start(self, command: list[str]) -> None:
        pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(ROOT)}
        log = (self.directory / f"{len(self.processes)}.log").open("w")
        with log:
            started = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)
        self.processes.append(started)

    def _heard(self) -> str:
        out = self.processes[-1].stdout
        assert out is not None
        return out.readline()

    def _tell(self, what: Any) -> Any:
        bot = self.processes[0]
        assert bot.stdin is not None
        assert bot.stdout is not None
        bot.stdin.write(json.dumps(what) + "\n")
        bot.stdin.flush()
        return json.loads(bot.stdout.readline())

    # --- what one can see ---

    def ask(self, count: int, user: str = "") -> list[str]:
        """The answers to as many new questions."""
        first, self.asked = self.asked, self.asked + count
        return [self._tell([f"How many plums are {n}?", user or f"u{10 + n % 8}"]) for n in range(first, first + count)]

    def json(self, *words: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, [*words, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    @property
    def status(self) -> dict[str, Any]:
        return self.json("status")

    @property
    def learner(self) -> str:
        """The policy that the page calls agent@1, whatever the first cycle made of it."""
        leads = {"learner", "canary", "champion"}
        (name,) = [each["name"] for each in self.json("policies")["policies"] if each["state"] in leads]
        return name

    def recorded(self, what: str = "calls") -> Any:
        return self.status["recorded"][what]


# --- what each step promises ---


def after_1(days: Days) -> None:
    assert len(days.upstream.seen) == 1
    assert days.ask(23) == [PROVIDERS] * 23
    eventually((days.project / "store.db").exists)


def after_2(days: Days) -> None:
    assert "0 groups wait" in days.said
    assert "nothing was sent" in days.said
    eventually(lambda: days.recorded() == 24)
    assert days.recorded("calls_by_policy") == 0
    assert days.ask(1, user="u2") == [PROVIDERS]
    eventually(lambda: days.recorded("not_learned_from") == {"its user withdrew": 1})


def after_3(days: Days) -> None:
    assert "agrees with the labels" in days.said
    rewards = [each["reward"] for each in days.json("trajectories", "list")["trajectories"]]
    assert rewards.count(1.0) == 1
    assert set(rewards) == {1.0, None}


def after_4(days: Days) -> None:
    assert days.status["champion"] is None
    assert days.status["learner"]["policy"] == "agent@0"
    time.sleep(FOLLOWED_S)
    assert days.ask(4) == [PROVIDERS] * 4
    eventually(lambda: days.recorded("calls_shadow") > 0)
    assert days.recorded("calls_by_policy") == 0


def after_5(days: Days) -> None:
    assert days.code in (0, 4), days.said
    (report,) = (days.project / "cycles").glob("*.md")
    known = json.loads(report.with_suffix(".json").read_text())
    assert known["outcome"] in ("nothing to do", "learns", "rejected", "canary", "out of time")
    assert all(part in report.read_text() for part in known["reason"].split("; "))
    assert "the judge cost" in report.read_text()
    assert days.recorded("judge")["calls"] > 0
    assert "judging sends recorded prompts" in days.said
    assert days.ask(4) == [PROVIDERS] * 4


def after_6(days: Days) -> None:
    (line,) = [line for line in (days.directory / "bin/table").read_text().splitlines() if not line.startswith("#")]
    assert "retrain" in line
    assert "--max-usd 2 --max-minutes 240" in line
    settings = days.project / "retrain.env"
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    assert "ART_PATCH_JUDGE" in settings.read_text()


def after_7(days: Days) -> None:
    assert days.status["learner"]["policy"] == days.learner
    assert "upstream answers; it learns until it has proven itself" in days.said


def after_8(days: Days) -> None:
    tested = days.status["challenger"]
    assert (tested["policy"], tested["state"], tested["percent"]) == (days.learner, "canary", 20)
    assert "goes on against upstream" in days.said
    time.sleep(FOLLOWED_S)  # 200 questions may take less time than the app to follow
    for _ in range(40):
        if any(answer != PROVIDERS for answer in days.ask(5)):
            break
    eventually(lambda: days.recorded("calls_by_policy") > 0)


def after_promotion(days: Days) -> None:
    assert days.status["control_percent"] == 5
    assert "but for 5 % of the sessions" in days.said


def after_9(days: Days) -> None:
    assert days.status["champion"] == days.learner
    assert days.status["control_percent"] == 10
    assert days.learner in days.said
    time.sleep(FOLLOWED_S)
    assert sum(answer != PROVIDERS for answer in days.ask(10)) >= 5


def after_rollback(days: Days) -> None:
    assert days.status["champion"] is None
    assert days.status["learner"]["policy"] == days.learner
    time.sleep(FOLLOWED_S)
    assert days.ask(4) == [PROVIDERS] * 4


def after_mode_record(days: Days) -> None:
    time.sleep(FOLLOWED_S)
    calls, copies = days.recorded(), days.recorded("calls_shadow")
    assert days.ask(2) == [PROVIDERS] * 2
    eventually(lambda: days.recorded() == calls + 2)
    assert days.recorded("calls_shadow") == copies


def after_mode_off(days: Days) -> None:
    time.sleep(FOLLOWED_S)
    calls = days.recorded()
    assert days.ask(2) == [PROVIDERS] * 2
    time.sleep(FOLLOWED_S)
    assert days.recorded() == calls


def after_mode_route(days: Days) -> None:
    time.sleep(FOLLOWED_S)
    copies = days.recorded("calls_shadow")
    assert days.ask(4) == [PROVIDERS] * 4
    eventually(lambda: days.recorded("calls_shadow") > copies)


def after_10(days: Days) -> None:
    assert "sound" in days.said
    assert (days.directory / "support-bot.db").exists()


AT_ONCE = {
    "mode route": after_mode_route,
    "promote agent@1 --reason 'the canary went well'": after_promotion,
    "rollback": after_rollback,
    "mode record": after_mode_record,
    "mode off": after_mode_off,
}
"""What is looked at before the next command of the step."""
PROMISES = (after_1, after_2, after_3, after_4, after_5, after_6, after_7, after_8, after_9, after_10)


@pytest.fixture
def days(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Days]:
    crontab = tmp_path / "bin/crontab"
    crontab.parent.mkdir()
    crontab.write_text(CRONTAB)
    crontab.chmod(0o755)
    (tmp_path / "bin/table").touch()
    for name in [name for name in os.environ if name.startswith("ART_PATCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    with serving() as upstream, serve_stand_in_judge(is_foreign) as judge:
        own = {"ART_PATCH_HOME": str(tmp_path / "home"), "ART_PATCH_JUDGE_BASE_URL": judge}
        own |= {"OPENAI_BASE_URL": upstream.url, "PATH": f"{crontab.parent}:{os.environ['PATH']}"}
        for name, value in (LESS | own).items():
            monkeypatch.setenv(name, value)
        found = Days(tmp_path, base, upstream, monkeypatch)
        try:
            yield found
        finally:
            found.end()


@pytest.mark.slow
def test_each_step_does_what_the_page_says(days: Days):
    page = steps()
    assert list(page) == list(range(1, 11))
    for blocks, promise in zip(page.values(), PROMISES, strict=True):
        for block in blocks:
            if block.language == "python":
                days.python(block.code)
            for words in commands(block.code) if block.language == "bash" else ():
                days.command(words)
                if (holds := AT_ONCE.get(shlex.join(words[1:]))) is not None:
                    holds(days)
        promise(days)


OLDER = """
import subprocess, sys, time
import openai
import art_patch as art

art.patch(project="support-bot")
client = openai.OpenAI()

def call(text):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

call("one")
assert art.flush(60)
if sys.argv[1] != "late":
    subprocess.run([sys.executable, "-m", "art_patch", "projects"], cwd=sys.argv[1], check=True, stdout=2)
    call("two")
    assert art.flush(60)
assert art.status().degraded == ()
"""


@pytest.mark.slow
def test_an_upgrade_in_another_order_loses_no_call(tmp_path: Path):
    """The job is upgraded first: apps of the old release go on writing, also those that start later."""
    newer = next_release(tmp_path)
    with serving() as upstream:
        own = {"ART_PATCH_HOME": str(tmp_path / "home"), "OPENAI_BASE_URL": upstream.url, "OPENAI_API_KEY": "k"}
        environment = ENVIRONMENT | own | {"PYTHONPATH": str(ROOT)}

        def run(*words: str, cwd: Path = tmp_path, code: int = 0) -> str:
            changes = {"PYTHONPATH": str(cwd)} if cwd == newer else {}
            done = subprocess.run(
                [sys.executable, *words],
                cwd=cwd, env=environment | changes, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == code, done.stderr
            return done.stdout + done.stderr

        def recorded(code: int = 0, **where: Any) -> str:
            return run("-m", "art_patch", "status", "--project", "support-bot", "--json", code=code, **where)

        run("-c", OLDER, str(newer))
        run("-c", OLDER, "late")
        assert "newer release" in recorded(code=12)
        assert json.loads(recorded(cwd=newer))["recorded"]["calls"] == 3
