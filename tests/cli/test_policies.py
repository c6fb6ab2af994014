"""`promote`, `rollback`, `policies`, `history` and `diff` as a user meets them, over the real embedded engine."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art_patch.policies import base_fingerprint
from art_patch.store import Store, open_store
from art_patch.types import Call, Choice, Policy, Score, TrajectoryInfo
from tests.support.command_line import Serving, art_patch, says
from tests.support.tiny import make_tiny_adapter, make_tiny_model


def store_of(home: Path) -> Store:
    return open_store(f"sqlite:///{home}/default/store.db")


def said(home: Path, *arguments: str) -> Any:
    """What a command answers, as JSON."""
    result = art_patch(*arguments, "--json", home=home)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def served_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server, and two candidates that it can load."""
    home = tmp_path_factory.mktemp("served")
    base = make_tiny_model(home / "base", hidden=32, vocab_size=320)
    server = Serving(base, home)
    store = store_of(home)
    for step in (1, 2):
        path = make_tiny_adapter(home / "default" / "adapters", base, "agent", step, seed=step)
        name, metrics = f"agent@{step}", {"gate": {"scenarios": 9, "lower_bound": 0.0625}}
        store.ledger.add_candidate(
            Policy(name, str(base), base_fingerprint(base), "candidate", time.time(), str(path), "agent@0", metrics),
            trained_on=[],
            who="test",
        )
    store.close()
    yield home
    assert server.stop() == (0, "")


@pytest.fixture
def home(served_home: Path, tmp_path: Path) -> Path:
    """A home of the test's own, at that server."""
    store = store_of(served_home)
    (tmp_path / "default").mkdir()
    store.maintain.backup(tmp_path / "default" / "store.db")
    store.close()
    shutil.copy2(served_home / "default" / "admin.key", tmp_path / "default")
    return tmp_path


def went_back(home: Path, *arguments: str) -> tuple[str | None, str | None]:
    """Who serves after a rollback, and whose test it ended."""
    told = said(home, "rollback", *arguments)
    return told["champion"], told["rejected"]


def states(home: Path) -> dict[str, tuple[str, float | None]]:
    return {one["name"]: (one["state"], one["percent"]) for one in said(home, "policies")["policies"]}


@pytest.mark.slow
def test_a_canary_is_shown_given_up_and_never_tested_again(home: Path):
    assert said(home, "promote", "agent@1", "--canary", "5", "--reason", "try it") == {
        "champion": "agent@0",
        "policy": "agent@1",
        "state": "canary",
        "percent": 5.0,
        "control_percent": 0.0,
        "rewards": {},
        "apps": 0,
        "dry_run": False,
    }
    for dry in ([], ["--dry-run"]):
        says(art_patch("promote", "agent@2", "--shadow", *dry, home=home), 14, "agent@1 is canary already", "rollback")
        says(
            art_patch("promote", "agent@1", "--canary", "5", *dry, home=home), 14, "answers 5 % of the sessions already"
        )
    assert states(home) == {"agent@0": ("champion", 95.0), "agent@1": ("canary", 5.0), "agent@2": ("candidate", None)}
    shown = art_patch("policies", home=home, COLUMNS="80").stdout.splitlines()
    assert [line.split()[:3] for line in shown[1:]] == [
        ["agent@0", "champion", "the"],
        ["agent@1", "canary", "agent@0"],
        ["gate:", "difference", "above"],
        ["agent@2", "candidate", "agent@0"],
        ["gate:", "difference", "above"],
    ]
    assert shown[3].rstrip().endswith("difference above +0.062, 9 scenarios")
    assert shown[2].endswith("  5 %")
    (line,) = [line for line in art_patch("status", home=home).stdout.splitlines() if line.startswith("challenger")]
    assert "agent@1 canary, 5 % of sessions, for " in line
    wider = {"champion": "agent@0", "policy": "agent@1", "state": "canary", "percent": 20.0, "rewards": {}, "apps": 0}
    wider["control_percent"] = 0.0
    widened = ("promote", "agent@1", "--canary", "20", "--reason", "looks good")
    assert said(home, *widened, "--dry-run") == wider | {"dry_run": True}
    assert states(home)["agent@1"] == ("canary", 5.0)
    assert said(home, *widened) == wider | {"dry_run": False}
    would = art_patch("rollback", "--dry-run", home=home).stdout
    assert would == (
        "dry run, nothing is changed: agent@1 is rejected; agent@0 answers every session; "
        "no app process runs at present\n"
    )
    assert states(home)["agent@1"] == ("canary", 20.0)
    told = art_patch("rollback", "--reason", "no", home=home).stdout
    assert told == "agent@1 is rejected; agent@0 answers every session; no app process runs at present\n"
    says(art_patch("promote", "agent@1", home=home), 14, "stays that way")
    moves = said(home, "history", "-n", "3")["history"]
    assert [(m["policy"], m["from_state"], m["to_state"], m["reason"]) for m in moves] == [
        ("agent@1", "canary", "rejected", "no"),
        ("agent@1", "canary", "canary", "looks good"),
        ("agent@1", "candidate", "canary", "try it"),
    ]
    assert all(m["who"].endswith(("(art-patch rollback)", "(art-patch promote)")) for m in moves)
    # A line for each decision, and below it who made it and why.
    lines = art_patch("history", home=home).stdout.splitlines()
    assert [line.partition("  ")[2] for line in lines[:4:2]] == [
        "agent@1  canary -> rejected",
        "agent@1  canary 5 % -> canary 20 %",
    ]
    assert [line.strip() for line in lines[1:6:2]] == [f"by {move['who']}: {move['reason']}" for move in moves]
    assert lines[-2].endswith("agent@0  new -> candidate")


@pytest.mark.slow
def test_a_server_starts_without_a_challenger_that_cannot_be_loaded(served_home: Path, tmp_path: Path):
    """Only the champion is needed; what else it should hold and cannot is told."""
    base = served_home / "base"
    Serving(base, tmp_path).stop()
    store = store_of(tmp_path)
    for step in (1, 2):
        path = tmp_path / "default" / "adapters" / f"agent@{step}"
        policy = Policy(path.name, str(base), base_fingerprint(base), "candidate", time.time(), str(path), "agent@0")
        store.ledger.add_candidate(policy, trained_on=[], who="test")
    store.ledger.move("agent@1", "canary", who="test", reason="its files are gone", percent=5)
    again = Serving(base, tmp_path)
    assert again.ready["models"] == ["agent@0"]
    code, told = again.stop()
    assert code == 0
    assert "agent@1 is not served" in told
    store.ledger.move("agent@2", "champion", who="test", reason="its files are gone, too")
    store.close()
    says(art_patch("serve", "--base", base, "--port", "0", home=tmp_path), 11, "agent@2")


@pytest.mark.slow
def test_a_shadow_becomes_champion_and_rollback_goes_back(home: Path):
    told = art_patch("promote", "agent@2", "--shadow", home=home).stdout
    assert told.startswith("agent@2 is asked in the background what apps ask; agent@0 serves; no app process runs")
    assert said(home, "promote", "agent@2")["champion"] == "agent@2"
    assert states(home)["agent@2"] == ("champion", 100.0)
    assert went_back(home) == ("agent@0", None)
    assert states(home)["agent@2"] == ("retired", None)
    says(art_patch("rollback", home=home), 19, "no earlier champion", "art-patch history")


def test_what_was_retired_is_tested_again_and_never_serves_untested(home: Path):
    store = store_of(home)
    for step, right in (("1", 0.25), ("2", 0.75)):
        store.ledger.move(f"agent@{step}", "champion", who="test", reason="won")
        write(store, step, time.time(), f"agent@{step}", "plums?", "5 cents")
        store.write([Score(f"s{step}", f"t-{step}", "reward", right, "code", time.time())])
    store.close()
    for dry in ([], ["--dry-run"]):
        refused = art_patch("promote", "agent@1", *dry, home=home)
        says(refused, 14, "test it again: `art-patch promote agent@1 --canary 5`", "`art-patch rollback --to agent@1`")
    would = art_patch("promote", "agent@1", "--canary", "5", "--dry-run", home=home).stdout
    assert would.startswith("dry run, nothing is changed: agent@1 answers 5 % of the sessions, agent@2 all others; ")
    assert states(home)["agent@1"] == ("retired", None)
    assert said(home, "promote", "agent@1", "--canary", "5")["state"] == "canary"
    worse = art_patch("promote", "agent@1", "--dry-run", home=home)  # by hand, out of its test
    assert worse.stdout.startswith("dry run, nothing is changed: agent@1 serves; ")
    assert "worse: agent@1 0.250 in 1 run against agent@2 0.750 in 1 run" in worse.stderr
    ended = "agent@1 is retired; agent@2 answers every session; no app process runs at present\n"
    assert art_patch("rollback", "--dry-run", home=home).stdout == f"dry run, nothing is changed: {ended}"
    told = said(home, "rollback", "--dry-run")
    assert (told["champion"], told["test_ended"], told["rejected"]) == ("agent@2", "agent@1", None)
    assert art_patch("rollback", home=home).stdout == ended
    assert states(home)["agent@1"] == ("retired", None)
    assert went_back(home, "--to", "agent@1") == ("agent@1", None)


def test_an_unknown_policy_is_refused_before_an_engine_is_asked_for(home: Path):
    store = store_of(home)
    store.ledger.set_engine(None, who="test")
    store.close()
    for command in (["promote", "agent@9"], ["promote", "agent@9", "--canary", "5", "--dry-run"]):
        says(art_patch(*command, home=home), 19, "agent@9", "art-patch policies")
    says(art_patch("reject", "agent@9", "--reason", "x", "--dry-run", home=home), 19, "agent@9")
    says(art_patch("reject", "agent@0", "--reason", "x", "--dry-run", home=home), 14, "is champion")


def test_a_dry_run_says_which_sessions_stay_with_upstream_from_then_on(home: Path):
    store = store_of(home)
    store.ledger.move("agent@0", "learner", who="test", reason="upstream answers")
    serves = "agent@1 serves, but for 5 % of the sessions, the control group (`art-patch mode --control`); "
    tested = (
        "agent@1 answers 10 % of the sessions, upstream all others; if it wins, 5 % of the sessions stay with upstream"
    )
    would = art_patch("promote", "agent@1", "--dry-run", home=home).stdout
    assert would.startswith(f"dry run, nothing is changed: {serves}")
    would = art_patch("promote", "agent@1", "--canary", "10", "--dry-run", home=home).stdout
    assert would.startswith(f"dry run, nothing is changed: {tested}, as a control group; ")
    assert said(home, "promote", "agent@1", "--dry-run")["control_percent"] == 5.0
    assert (store.ledger.control_shares(), store.ledger.route().control_percent) == ((), 0.0)
    assert art_patch("promote", "agent@1", home=home).stdout.startswith(serves)
    assert store.ledger.route().control_percent == 5.0
    # A share that a person has set stays, be it none; and beside a champion no group begins.
    store.ledger.set_control_group(0, who="test")
    for state in ("learner", "champion"):
        told = art_patch("promote", "agent@2", "--dry-run", home=home).stdout
        assert told.startswith("dry run, nothing is changed: agent@2 serves; no app process runs at present")
        if state == "learner":
            store.ledger.move("agent@1", state, who="test", reason="upstream answers")
    store.close()


def test_rollback_needs_no_engine_and_a_test_does(home: Path):
    store = store_of(home)
    store.ledger.set_engine(None, who="test")
    store.ledger.move("agent@1", "champion", who="test", reason="won")
    store.ledger.move("agent@2", "canary", who="test", reason="try", percent=5)
    store.close()
    assert went_back(home) == ("agent@1", "agent@2")
    assert went_back(home) == ("agent@0", None)
    says(art_patch("promote", "agent@1", "--canary", "5", home=home), 6, "art-patch serve")


def test_what_is_rejected_for_good_is_unloaded_and_nobody_goes_back_to_it(home: Path):
    said(home, "promote", "agent@1")
    store = store_of(home)
    store.ledger.move("agent@2", "champion", who="test", reason="won")
    says(art_patch("reject", "agent@2", "--reason", "leaks", home=home), 14, "is champion", "art-patch rollback")
    would = art_patch("reject", "agent@1", "--reason", "leaks", "--dry-run", home=home).stdout
    assert would.startswith("dry run, nothing is changed: agent@1 is rejected for good, was retired; agent@2 serves; ")
    assert states(home)["agent@1"] == ("retired", None)
    told = said(home, "reject", "agent@1", "--reason", "leaks")
    its = {"champion": "agent@2", "rejected": "agent@1", "was": "retired", "unloaded": True}
    assert told == its | {"apps": 0, "dry_run": False}
    (last,) = store.ledger.history(limit=1)
    assert (last["policy"], last["to_state"], last["reason"]) == ("agent@1", "rejected", "leaks")
    assert last["who"].endswith("(art-patch reject)")
    store.close()
    assert went_back(home) == ("agent@0", None)


def test_one_goes_back_to_whom_one_names(home: Path):
    store = store_of(home)
    store.ledger.set_engine(None, who="test")
    for name in ("agent@1", "agent@2"):
        store.ledger.move(name, "champion", who="test", reason="won")
    for step, policy, right in ((0, "agent@0", 1.0), (1, "agent@2", 0.5), (2, None, 1.0)):
        write(store, f"{step}", time.time(), policy, "plums?", "5 cents")
        store.write([Score(f"s{step}", f"t-{step}", "reward", right, "code", time.time())])
    before = store.ledger.policies(), store.ledger.route()
    would = art_patch("rollback", "--to", "agent@0", "--dry-run", home=home)
    assert would.stdout == "dry run, nothing is changed: agent@0 serves again; no app process runs at present\n"
    assert would.stderr == ""
    assert said(home, "rollback", "--to", "upstream", "--dry-run") == {
        "champion": None, "test_ended": None, "rejected": None, "was": "agent@2", "apps": 0, "dry_run": True,
        "rewards": {"agent@2": {"reward": 0.5, "runs": 1}, "upstream": {"reward": 1.0, "runs": 1}},
    }  # fmt: skip
    already = art_patch("rollback", "--to", "agent@2", home=home)
    assert (already.returncode, already.stderr) == (0, "")
    assert already.stdout == "nothing to do: agent@2 answers already; no app process runs at present\n"
    says(art_patch("rollback", "--to", "agent@9", home=home), 19, "agent@9", "art-patch policies")
    assert (store.ledger.policies(), store.ledger.route()) == before
    assert went_back(home, "--to", "agent@0") == ("agent@0", None)
    worse = art_patch("rollback", "--to", "agent@2", "--dry-run", home=home)
    assert "worse: agent@2 0.500 in 1 run against agent@0 1.000 in 1 run" in worse.stderr
    store.ledger.move("agent@1", "rejected", who="test", reason="leaks")
    says(art_patch("rollback", "--to", "agent@1", home=home), 14, "is rejected")
    assert went_back(home, "--to", "upstream") == (None, None)
    assert states(home)["agent@0"] == ("learner", None)
    # Again, in both ways, does not undo it, although there are champions from before.
    before = store.ledger.policies(), store.ledger.route()
    for arguments in (["--to", "upstream"], [], ["--dry-run"]):
        already = art_patch("rollback", *arguments, home=home)
        assert (already.returncode, already.stderr) == (0, "")
        assert "nothing to do: upstream answers already; no app process runs at present\n" in already.stdout
    assert said(home, "rollback") == {
        "champion": None, "test_ended": None, "rejected": None, "was": "upstream", "apps": 0, "dry_run": False,
        "rewards": {},
    }  # fmt: skip
    assert (store.ledger.policies(), store.ledger.route()) == before
    assert went_back(home, "--to", "agent@0") == ("agent@0", None)
    store.close()


def test_who_is_named_ends_a_test_too(home: Path):
    store = store_of(home)
    store.ledger.set_engine(None, who="test")
    store.ledger.move("agent@1", "canary", who="test", reason="try", percent=5)
    says(art_patch("rollback", "--to", "agent@2", home=home), 14, "never served", "art-patch promote agent@2")
    assert states(home)["agent@1"] == ("canary", 5.0)
    assert went_back(home, "--to", "upstream") == (None, "agent@1")
    assert states(home) == {"agent@0": ("learner", None), "agent@1": ("rejected", None), "agent@2": ("candidate", None)}
    store.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["agent@1", "--canary", "0"], "above 0"),
        (["agent@1", "--canary", "101"], "up to 100"),
        (["agent@1", "--canary", "5", "--shadow"], "exclude each other"),
    ],
)
def test_an_impossible_share_is_named(home: Path, arguments: list[str], words: str):
    says(art_patch("promote", *arguments, home=home), 2, words)


def test_a_policy_that_is_not_there_is_named(home: Path):
    says(art_patch("promote", "agent@9", "--shadow", home=home), 19, "agent@9", "art-patch policies")
    says(art_patch("diff", "agent@0", "agent@9", home=home), 19, "agent@9", "art-patch policies")


def write(store: Store, key: str, at: float, policy: str | None, asked: str, answer: str, **changes: Any) -> None:
    choice = Choice(0, {"role": "assistant", "content": answer}, "stop")
    call = Call(
        key, f"t-{key}", at, "gpt-x", ({"role": "user", "content": asked},), (choice,), policy=policy, **changes
    )
    store.write([TrajectoryInfo(f"t-{key}", at, "shadow" if call.shadow_of else "single"), call])


def test_tool_calls_are_alike_if_they_mean_the_same(home: Path):
    """Their ids are random, and servers write the JSON of arguments in different ways."""
    store = store_of(home)
    for number, (arguments, name) in enumerate((('{"item": "honey"}', "a"), ('{"item":"tea"}', "b"))):
        asked = {"role": "user", "content": name}
        for policy, text in (("agent@0", arguments), ("agent@1", '{"item":"honey"}')):
            key = f"{name}-{policy}"
            function = {"name": "lookup", "arguments": text}
            calls = [{"id": f"call_{key}", "type": "function", "function": function}]
            choice = Choice(0, {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls")
            made = Call(key, f"t-{key}", number + 1.0, "gpt-x", (asked,), (choice,), policy=policy)
            store.write([TrajectoryInfo(f"t-{key}", number + 1.0, "single"), made])
    store.close()
    pairs = said(home, "diff", "agent@0", "agent@1")["pairs"]
    assert {pair["messages"][0]["content"]: pair["alike"] for pair in pairs} == {"a": True, "b": False}
    shown = art_patch("diff", "agent@0", "agent@1", home=home).stdout
    assert "2 prompts were answered by both; 1 of these alike" in shown
    assert "call_a-agent" not in shown


def test_whatever_a_model_wrote_is_compared(home: Path):
    store = store_of(home)
    deep = "[" * 100_000
    for number, tools in enumerate(
        (
            [{"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}],
            ["no call"],
            [{"id": "c", "function": "f"}],
            [{"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        )
    ):
        for policy in ("agent@0", "agent@1"):
            said_by = (
                tools
                if number < 3 or policy == "agent@0"
                else [{"id": "c", "function": {"name": "f", "arguments": '{"a": true}'}}]
            )
            choice = Choice(0, {"role": "assistant", "content": None, "tool_calls": said_by}, "tool_calls")
            asked = ({"role": "user", "content": f"{number}"},)
            key = f"{number}-{policy}"
            store.write(
                [
                    TrajectoryInfo(f"t-{key}", number + 1.0, "single"),
                    Call(key, f"t-{key}", number + 1.0, "gpt-x", asked, (choice,), policy=policy),
                ]
            )
    store.close()
    pairs = said(home, "diff", "agent@0", "agent@1")["pairs"]
    assert {pair["messages"][0]["content"]: pair["alike"] for pair in pairs} == {
        "0": True, "1": True, "2": True, "3": False,
    }  # fmt: skip
    assert art_patch("diff", "agent@0", "agent@1", home=home).returncode == 0


def test_answers_to_the_same_prompts_stand_side_by_side(home: Path):
    store = store_of(home)
    write(store, "01", 1.0, "agent@0", "the price of plums?", "5 cents")
    write(store, "02", 2.0, "agent@1", "the price of plums?", "\x1b[31mfive cents", shadow_of="01")
    write(store, "03", 3.0, "agent@0", "the price of pears?", "7 cents")
    write(store, "04", 4.0, "agent@1", "the price of pears?", "7 cents")
    write(store, "05", 5.0, "agent@1", "the price of apples?", "9 cents")
    write(store, "06", 6.0, "agent@0", "the price of plums?", "6 cents")
    write(store, "07", 7.0, None, "the price of plums?", "8 cents")
    write(store, "08", 8.0, "agent@1", "the price of plums?", "broken", status="error")
    store.close()
    found = said(home, "diff", "agent@0", "agent@1")
    assert (found["a"], found["b"], found["prompts"]) == ("agent@0", "agent@1", 2)
    assert [(pair["a"]["call"], pair["b"]["call"], pair["b"]["shadow_of"]) for pair in found["pairs"]] == [
        ("06", "02", "01"),
        ("03", "04", None),
    ]
    assert found["pairs"][1]["messages"] == [{"role": "user", "content": "the price of pears?"}]
    assert found["pairs"][1]["a"]["answers"] == [{"role": "assistant", "content": "7 cents"}]
    shown = art_patch("diff", "agent@0", "agent@1", home=home, COLUMNS="80").stdout
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "user: the price of plums?"
    assert lines[2].split() == ["6", "cents", "\\x1b[31mfive", "cents"]
    assert lines[-1] == "2 prompts were answered by both; 1 of these alike"
    assert said(home, "diff", "upstream", "agent@0", "-n", "1")["pairs"][0]["a"]["call"] == "07"
    cut = art_patch("diff", "agent@0", "agent@1", "-n", "1", home=home).stdout
    assert cut.splitlines()[-1] == "2 prompts were answered by both; the 1 newest are above, 0 of them alike"
    none = art_patch("diff", "agent@1", "agent@2", home=home)
    assert (none.returncode, none.stdout.startswith("no prompt is recorded that both agent@1 and agent@2")) == (0, True)
    assert said(home, "diff", "agent@1", "agent@2") == {"a": "agent@1", "b": "agent@2", "prompts": 0, "pairs": []}
