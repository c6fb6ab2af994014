"""`art-patch status` stays readable whatever has run."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from art_patch.store import open_store
from art_patch.types import AppReport, Call
from tests.support.command_line import art_patch

FACTS: dict[str, Any] = {
    "mode": "record", "recorded": 1, "dropped": 0, "fallbacks": 0, "shadowed": 0, "bypasses": {"anthropic": 2},
    "instrumented": ["openai 2.54.0", "integration mcp.clients"], "degraded": ["The engine is not asked: no key."],
}  # fmt: skip


def status_of(home: Path, reports: list[AppReport]) -> str:
    store = open_store(f"sqlite:///{home}/default/store.db")
    store.write(reports)
    store.close()
    done = art_patch("status", home=home, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_hundred_processes_that_ended_are_four_lines(tmp_path: Path):
    now = time.time()
    ended = [AppReport(f"a-host-of-the-cluster:{10_000 + n}", now - 300 - n, FACTS) for n in range(200)]
    shown = status_of(tmp_path, [*ended, AppReport("old:1", now - 4_000, FACTS)])
    lines = shown[shown.index("groups") :].splitlines()[2:]
    assert lines == [
        "200 app processes in the last hour, most of them ended: 200 recorded, 0 dropped, 0 fell back, 0 shadowed",
        "200 processes: sees openai 2.54.0, integration mcp.clients",
        "200 processes: The engine is not asked: no key.",
        "400 calls went past the patch by anthropic",
    ]
    # Programs still read each of them.
    assert len(json.loads(art_patch("status", "--json", home=tmp_path).stdout)["apps"]) == 200


def test_running_processes_are_a_line_each_at_80_columns(tmp_path: Path):
    now = time.time()
    busy = FACTS | {"recorded": 123_456, "dropped": 12_345, "fallbacks": 1_234, "instrumented": ["openai 2.54.0"]}
    running = [AppReport(f"5f0c9a7e21bd:{10_000 + n}", now, busy) for n in range(12)]
    shown = status_of(tmp_path, [*running, AppReport("5f0c9a7e21bd:9", now - 500, FACTS)])
    lines = [line for line in shown.splitlines() if re.match("5f0c9a7e21bd:1", line)]
    assert {line.split()[0] for line in lines} < {report.id for report in running}, "ids are whole"
    assert len(lines) == 10 and all(line.split()[-4:] == ["record", "123456", "12345", "1234"] for line in lines)
    assert "3 app processes more in the last hour, most of them ended: 246913 recorded, 24690 dropped" in shown


def test_a_long_reason_of_a_decision_is_two_lines_at_80_columns(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    store.ledger.add_base("agent@0", "/base", "ff", who="ada")
    store.ledger.move("agent@0", "learner", who="ada", reason="far below upstream on held-out scenarios; " * 20)
    store.close()
    newest, *reason, before = art_patch("status", home=tmp_path, COLUMNS="80").stdout.splitlines()[-7:-3]
    assert newest.endswith("  agent@0  became learner") and before.endswith("  agent@0  became champion")
    why = " ".join(line.strip() for line in reason)
    assert why.startswith("by ada: far below upstream on held-out scenarios; far") and why.endswith(" ...")


def test_the_history_has_whole_words_at_80_columns(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    store.ledger.add_base("agent@0", "/base", "ff", who="ada")
    reason = "far below upstream on held-out scenarios; " * 5 + "the end"
    store.ledger.move("agent@0", "learner", who="ada (art-patch retrain)", reason=reason)
    store.close()
    newest, *why = art_patch("history", home=tmp_path, COLUMNS="80").stdout.splitlines()[:-4]
    assert newest.endswith("  agent@0  champion -> learner")
    assert max(map(len, why)) <= 80
    assert " ".join(line.strip() for line in why) == f"by ada (art-patch retrain): {reason}"


def test_a_change_of_upstreams_model_is_shown_for_as_long_as_it_counts(tmp_path: Path):
    now = time.time()
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")

    def see(name: str, at: float) -> None:
        store.write([Call(f"c{at}", "t1", at, "gpt-x", ({"role": "user", "content": "hi"},), answered_by=name)])

    see("m-1", now - 40 * 86_400)
    see("m-2", now - 29 * 86_400)
    assert "upstream" not in _rows(tmp_path)
    assert json.loads(art_patch("status", "--json", home=tmp_path).stdout)["upstream_change"] is None
    see("m-[red]3", now - 3_600)
    store.close()
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(now - 3_600))
    said = f"upstream's model changed at {when}: m-2 -> m-[red]3; earlier evidence is not used"
    assert said in " ".join(art_patch("status", home=tmp_path, COLUMNS="80").stdout.split())
    told = json.loads(art_patch("status", "--json", home=tmp_path).stdout)["upstream_change"]
    assert told == {"requested_model": "gpt-x", "before": "m-2", "after": "m-[red]3", "at": now - 3_600}


def _rows(home: Path) -> list[str]:
    return [line.split("  ")[0] for line in art_patch("status", home=home, COLUMNS="80").stdout.splitlines()]


def test_the_control_group_has_an_age_and_ends_with_a_rollback_to_upstream(tmp_path: Path):
    now = time.time()
    sides = {"champion": {"sessions": 90}, "upstream": {"sessions": 10}}
    look = {"at": now - 200, "policy": "agent@0", "says": "not proven worse than upstream", "begin": now - 7_000.0}
    look |= {"signals": {"reward": {"difference": -0.1, "error": 0.02}}, "days_to_notice": {}, **sides}
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    store.ledger.set_control_group(20, who="ada", now=now - 9_000)
    store.ledger.add_base("agent@0", "/base", "ff", who="ada", now=now - 8_000)

    def line() -> str:
        shown = art_patch("status", home=tmp_path, COLUMNS="80").stdout
        assert max(map(len, shown.splitlines())) <= 80
        return " ".join(shown.partition("control group")[2].partition("engine")[0].split())

    when = f"{datetime.fromtimestamp(now - 8_000):%Y-%m-%d %H:%M}, 2 h ago"
    since = f"20 % of the sessions stay with upstream since {when}; "
    assert line() == f"{since}not compared yet"
    store.ledger.keep_control_look(look)
    assert line().startswith(f"{since}compared 3 min ago: since ")
    assert line().endswith(", 90 sessions against 10; reward lower by 0.100 ± 0.040; not proven worse than upstream")
    told = json.loads(art_patch("status", "--json", home=tmp_path).stdout)
    assert (told["control_percent"], told["control_since"]) == (20.0, now - 8_000)
    assert "; 20 % of the sessions stay with upstream" in art_patch("mode", "route", home=tmp_path).stdout
    store.ledger.move("agent@0", "learner", who="ada", reason="upstream answers", now=now - 100)
    assert line() == ""
    told = json.loads(art_patch("status", "--json", home=tmp_path).stdout)
    assert (told["control_percent"], told["control_since"], told["control_look"]) == (20.0, None, None)
    assert "stay with upstream" not in art_patch("mode", "route", home=tmp_path).stdout
    # What was seen before the rollback says nothing about the policy that serves again.
    store.ledger.move("agent@0", "champion", who="ada", reason="again", now=now - 50)
    assert line().endswith(" s ago; not compared yet")
    store.close()


def test_status_tells_since_when_a_breaker_is_open(tmp_path: Path):
    now = time.time()
    opened = [FACTS | {"open_breakers": ["engine"], "breakers_open_since": {"engine": now - ago}} for ago in (200, 500)]
    older = FACTS | {"open_breakers": ["engine", "challenger"]}  # of a release that does not tell when
    reports = [AppReport(f"host:{n}", now, facts) for n, facts in enumerate([*opened, older, FACTS])]
    # Of a process that has ended nobody knows.
    shown = status_of(tmp_path, [*reports, AppReport("host:9", now - 2_000, opened[1])])
    assert max(len(line) for line in shown.splitlines() if line.startswith("circuit breaker")) <= 80
    at = f"{datetime.fromtimestamp(now - 500):%Y-%m-%d %H:%M:%S}, 8 min ago"
    flat = " ".join(shown.split())
    assert f"circuit breaker of the engine: open in 3 of 4 app processes since {at} circuit breaker" in flat
    assert "circuit breaker of the challenger: open in 1 of 4 app processes 5 processes: sees" in flat
    # What another release, or somebody else, says in another form is left out.
    odd: list[Any] = ["soon", [1], None, 1e400, float("nan"), -1, True]
    strange = [FACTS | {"open_breakers": ["engine", {}], "breakers_open_since": {"engine": at}} for at in odd]
    strange += [FACTS | {"open_breakers": "engine"}, FACTS | {"open_breakers": ["engine"], "breakers_open_since": 3}]
    store = open_store(f"sqlite:///{tmp_path}/odd/default/store.db")
    store.write([AppReport(f"host:{n}", now, facts) for n, facts in enumerate(strange)])
    store.close()
    done = art_patch("status", home=tmp_path / "odd")
    assert (done.returncode, done.stderr) == (0, "")
    assert "circuit breaker of the engine: open in 8 of 9 app processes" in done.stdout
