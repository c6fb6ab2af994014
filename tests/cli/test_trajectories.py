"""`art-patch trajectories`, `export` and `import` as a user meets them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from art_patch._lib.ids import new_id
from art_patch.cli.app import app
from art_patch.store import open_store
from art_patch.types import Call, Choice, TrajectoryInfo
from tests.support.command_line import art_patch, says
from tests.support.run_samples import fill, tool_run

EVIL = "\x1b]0;owned\x07 [bold red]markup[/] \u202egnp.exe\x9b31m"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    store = open_store(f"sqlite:///{home}/default/store.db")
    fill(store)
    now = time.time()
    for number, text in enumerate((EVIL, "word " * 2_000)):
        key = f"01a20403bcae7b{number}"  # told apart by more characters than ids usually are
        key += new_id()[len(key) :]
        answer = Choice(0, {"role": "assistant", "content": text}, "stop")
        call = Call(new_id(), key, now, "gpt-5", ({"role": "user", "content": EVIL},), (answer,), duration_ms=40.0)
        store.write([TrajectoryInfo(key, now, user_id=EVIL, name="evil" if text is EVIL else "long"), call])
    store.close()
    return home


def shown(home: Path, *arguments: str, columns: int = 80) -> str:
    result: subprocess.CompletedProcess[str] = art_patch(*arguments, home=home, COLUMNS=str(columns))
    assert result.returncode == 0, result.stderr
    assert not [character for character in result.stdout if character in "\x1b\x07\x9b\u202e"]
    return result.stdout


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_list_fits_the_terminal(home: Path, columns: int):
    lines = shown(home, "trajectories", "list", columns=columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) == 12
    assert ("user" in lines[0]) == ("session" in lines[0]) == (columns >= 80)
    assert ("tokens" in lines[0]) == (columns >= 120)
    assert lines[0].endswith(" reward")
    (line,) = [line for line in lines if line.startswith("a2 ")]
    assert "fruit" in line
    assert line.split()[-2:] == ["agent@1", "0.95"]
    assert any("failed" in line for line in lines)


def test_a_list_goes_on_where_it_ended(home: Path):
    first = shown(home, "trajectories", "list", "-n", "4")
    assert "4 of 11; older ones: --after plain" in first
    assert shown(home, "trajectories", "list", "-n", "1", "--after", "b2").splitlines()[1].startswith("b1")
    assert shown(home, "trajectories", "list", "--after", "opened") == "no more\n"


def test_a_list_as_json(home: Path):
    told = json.loads(shown(home, "trajectories", "list", "--json", "--user", "user-a", "--min-reward", "0.9"))
    (one,) = told["trajectories"]
    assert (one["id"], one["reward"], one["status"], told["matching"], told["held"]) == ("a2", 0.95, "ok", 1, 11)


def test_the_worst_come_first_and_what_they_are_sorted_by_is_shown(home: Path):
    lines = shown(home, "trajectories", "list", "--sort", "latency", "-n", "2").splitlines()
    assert ("slowest" in lines[0], [line.split()[0] for line in lines[1:3]]) == (True, ["b2", "b1"])
    assert lines[-1] == "2 of 11"
    told = json.loads(shown(home, "trajectories", "list", "--sort", "reward", "--user", "user-a", "--json"))
    assert [(one["id"], one["reward"], one["slowest_ms"]) for one in told["trajectories"]] == [
        ("a1", 0.1, 500.0), ("a0", 0.8, 500.0), ("a2", 0.95, 500.0),
    ]  # fmt: skip
    line = shown(
        home, "trajectories", "list", "--slower-than", "400ms", "--model", "gpt-5-mini", "-n", "1"
    ).splitlines()[1]
    assert (line.split()[0], "500 ms" in line) == ("b2", True)
    assert shown(home, "trajectories", "list", "--error", "timeout").splitlines()[1].startswith("failed ")


def test_runs_are_found_by_their_text(home: Path, tmp_path: Path):
    def found(*arguments: str) -> list[str]:
        told = json.loads(shown(home, "trajectories", "list", "--json", *arguments))
        assert told["search"] == {"lag": 0, "more": False}
        return [one["id"] for one in told["trajectories"]]

    assert found("--search", '"is a plum"', "--user", "user-a") == ["a2", "a1", "a0"]
    assert found("--search", "31 cents", "--search", "pear") == ["b2", "b1", "b0"]
    assert found("--tool", "lookup", "-n", "2", "--after", "b1") == ["b0", "a2"]
    assert found("--tool", "lookup", "--sort", "reward", "-n", "2") == ["b1", "a1"]
    page = shown(home, "trajectories", "list", "--tool", "lookup", "-n", "2")
    assert [line.split()[0] for line in page.splitlines()[1:3]] == ["b2", "b1"]
    assert page.endswith("\n\n2 of 6; older ones: --after b1\n")
    assert shown(home, "trajectories", "list", "--search", "kangaroo") == "none of 11 trajectories matches\n"


def test_a_search_says_what_the_index_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    fill(store)
    store.close()
    monkeypatch.setattr("art_patch.insights.run_list.CATCH_UP_S", 0.0)
    result = CliRunner().invoke(app, ["trajectories", "list", "--search", "plum", "--home", str(tmp_path)])
    assert " ".join(result.output.split()).startswith(
        "none of 9 trajectories matches the index lacks the newest 15 calls; the same search again"
    ), result.output


def test_nothing_to_list(home: Path, tmp_path: Path):
    assert shown(home, "trajectories", "list", "--user", "nobody") == "none of 11 trajectories matches\n"
    says(art_patch("trajectories", "list", home=tmp_path), 19, "there is no store")
    open_store(f"sqlite:///{tmp_path}/default/store.db").close()
    words = "no trajectories are recorded yet; run your agent with art_patch.patch()\n"
    assert shown(tmp_path, "trajectories", "list") == words
    words = "the store has no trajectories yet; run your agent with art_patch.patch() first\n"
    assert shown(tmp_path, "export", str(tmp_path / "x.jsonl"), columns=120) == words


@pytest.mark.parametrize("columns", [80, 120])
def test_a_conversation_reads_well(home: Path, columns: int):
    page = shown(home, "trajectories", "show", "a2", "--tokens", columns=columns)
    assert max(map(len, page.splitlines())) <= columns
    for words in (
        "user-a", "group-a (scenario:plum, by scenario_key, scored)", "reward 0.95  by user", "brief",
        "call 1  agent@1", "tool_calls", "3 + 3 tokens", "500 ms", "tools: lookup", "  What is a plum?",
        '\u2192 lookup({"item": "plum"})  call_a2', "tool call_a2", "  31 cents", "  plum 2", "prompt: 3 token ids",
        "answer: 3 token ids, log-probability mean -0.500",
    ):  # fmt: skip
        assert words in page, words
    assert page.count("You sell fruit") == 1  # what the second call repeats is not shown again


def test_a_failure_says_why(home: Path):
    page = shown(home, "trajectories", "show", "fail")
    for words in ("failed      ValueError: no", "error", "APITimeoutError", "no answer"):
        assert words in page


def test_what_was_recorded_does_not_reach_the_terminal(home: Path):
    told = json.loads(shown(home, "trajectories", "list", "--json", "--name", "evil"))
    key = told["trajectories"][0]["id"]
    for options in ([], ["--raw"], ["--full"]):
        page = shown(home, "trajectories", "show", key, *options)
        assert "[bold red]markup[/]" in page
    assert "\\x1b]0;owned\\x07 [bold red]markup[/] \\u202egnp.exe\\x9b31m" in shown(home, "trajectories", "show", key)


def test_long_texts_are_cut_with_a_note(home: Path):
    told = json.loads(shown(home, "trajectories", "list", "--json", "--name", "long"))
    key = told["trajectories"][0]["id"]
    page = shown(home, "trajectories", "show", key)
    assert "... 8,500 more characters; --full shows them" in page
    assert shown(home, "trajectories", "show", key, "--full").count("word") == 2_000


def test_a_conversation_as_json_is_what_export_writes(home: Path, tmp_path: Path):
    line = json.loads(shown(home, "trajectories", "show", "a2", "--json"))
    shown(home, "export", str(tmp_path / "x"), "--format", "trajectories", "--user", "user-a", "--limit", "1")
    assert json.loads((tmp_path / "x").read_text()) == line
    assert line["calls"][0]["requested_model"] == tool_run("x", "x", "x").calls[0].requested_model


def test_a_session_reads_as_its_user_saw_it(home: Path):
    page = shown(home, "trajectories", "show", "--session", "session-2")
    assert max(map(len, page.splitlines())) <= 80
    shown_lines = "^session .*|  run .*|reward .*|ruler .*|^user|^assistant|  (?:What|plum|pear|\u2192).*"
    assert [line.strip(" \u2500") for line in re.findall(shown_lines, page, re.MULTILINE)] == [
        "session session-2  user-a, user-b",
        "reward 0.95", "run a2  fruit", "reward 0.95  by user", "user", "What is a plum?", "assistant",
        '\u2192 lookup({"item": "plum"})  call_a2', "assistant", "plum 2",
        "reward 0.95", "run b2  fruit", "ruler 0.95  by ruler", "user", "What is a pear?", "assistant",
        '\u2192 lookup({"item": "pear"})  call_b2', "assistant", "pear 2",
    ]  # fmt: skip
    assert "You sell fruit" not in page and "31 cents" not in page
    told = json.loads(shown(home, "trajectories", "show", "--session", "session-2", "--json"))
    assert (told["session"], told["matching"], len(told["trajectories"])) == ("session-2", 2, 2)
    assert told["trajectories"][0] == json.loads(shown(home, "trajectories", "show", "a2", "--json"))


def test_a_session_goes_on_from_run_to_run_and_repeats_only_what_is_said_again(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    said: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
    for number, (answer, asked) in enumerate((("hello", "a pear"), ("ok", "hi"), ("again?", ""))):
        key, final = f"run-{number}", {"role": "assistant", "content": answer}
        # The last run begins anew, with the words of the first one.
        messages = said[-1:] if number == 2 else said
        about: dict[str, Any] = {"status": "error", "error": "Timeout"} if number == 2 else {"fallback": "engine down"}
        call = Call(f"c{number}", key, 10.0 * number, "m", tuple(messages), (Choice(0, final, "stop"),), **about)
        store.write([TrajectoryInfo(key, 10.0 * number, session_id="long session"), call])
        said += [final, {"role": "user", "content": asked}]
    store.close()
    page = [line.strip() for line in shown(tmp_path, "trajectories", "show", "--session", "long").splitlines()]
    words = ("hi", "hello", "a pear", "ok", "again?", "Timeout", "fell back: engine down")
    assert [line for line in page if line in words] == [
        "hi", "hello", "fell back: engine down", "a pear", "ok", "fell back: engine down", "hi", "again?", "Timeout",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["trajectories", "show", "a"], 2, ["several ids begin with 'a': a0, a1, a2", "say more"]),
        (["trajectories", "show", "nobody"], 19, ["no trajectory has an id that begins with 'nobody'"]),
        (["trajectories", "show"], 2, ["name a trajectory by its id, or a session with --session"]),
        (["trajectories", "show", "a0", "--session", "session-1"], 2, ["name a trajectory by its id, or a session"]),
        (["trajectories", "show", "--session", "session-"], 2, ["several ids begin with 'session-'", "session-0"]),
        (["trajectories", "show", "--session", "x"], 19, ["no session has an id that begins with 'x'"]),
        (["trajectories", "show", "\x1b[2J"], 19, ["\\x1b[2J"]),
        (["trajectories", "list", "--since", "yesterday"], 2, ["--since", "7d"]),
        (["trajectories", "list", "--since", "1d", "--until", "2d"], 2, ["--since is not before --until"]),
        (["trajectories", "list", "--search", "?!"], 2, ["'?!' has no word to search for"]),
        (
            ["trajectories", "list", "--search", "plum", "--after", "b1"],
            2,
            ["--after b1: this trajectory does not match"],
        ),
        (["trajectories", "list", "--slower-than", "2"], 2, ["--slower-than '2'", "500ms"]),
        (["trajectories", "list", "--sort", "size"], 2, ["--sort 'size'", "newest, reward, latency"]),
        (["trajectories", "list", "--sort", "reward", "--after", "a0"], 2, ["--after", "-n"]),
        (["trajectories", "list", "--origin", "moon"], 2, ["--origin", "imported"]),
        (["trajectories", "list", "--policy", "best"], 2, ["NAME@STEP"]),
        (["trajectories", "list", "--policy", "agent@77"], 19, ["no policy 'agent@77'", "art-patch policies"]),
        (["analytics", "--policy", "agent@77"], 19, ["no policy 'agent@77'"]),
        (["export", "x", "--policy", "agent@77"], 19, ["no policy 'agent@77'", "art-patch policies"]),
        (["trajectories", "list", "--status", "fine"], 2, ["ok, error"]),
        (["export", "x", "--format", "csv"], 2, ["chat, trajectories, sft, preference, grpo"]),
        (["export", "x", "--format", "grpo", "--min-reward", "1"], 2, ["--margin"]),
        (["export", "/no/such/place/x"], 2, ["cannot be written"]),
        (["import", "/no/such/file"], 2, ["cannot be read"]),
        (["import", __file__], 15, ["line 1: not JSON"]),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], code: int, words: list[str], home: Path):
    says(art_patch(*arguments, home=home), code, *words)


def test_a_search_that_is_off_says_so(home: Path):
    result = art_patch("trajectories", "list", "--search", "plum", home=home, ART_PATCH_SEARCH="off")
    says(result, 2, "the search is off; set ART_PATCH_SEARCH=on")


def test_a_pipe_from_store_to_store(home: Path, tmp_path: Path):
    whole: dict[str, Any] = {}
    result = art_patch("export", "-", "--format", "trajectories", "--json", home=home)
    (tmp_path / "all.jsonl").write_text(result.stdout)
    whole = json.loads(result.stderr.splitlines()[-1])
    told = json.loads(shown(tmp_path, "import", str(tmp_path / "all.jsonl"), "--json"))
    assert whole["rows"] == told["trajectories"] == 12
