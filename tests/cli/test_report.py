"""`art-patch report` as a user meets it: on a terminal of 80 columns, as JSON, as Markdown."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from art_patch.store import open_store
from art_patch.types import Call, Choice, Judgement, Policy, Score, TrajectoryInfo
from tests.support.command_line import art_patch, says

DAY_S = 86_400.0
EVIL = "\x1b]0;owned\x07 [bold red]HTTP 500[/] | <b>"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A champion since two days, answering 40 of 80 runs, all rewarded; 38 of its own are good, 30 of upstream's."""
    home = tmp_path_factory.mktemp("home")
    store = open_store(f"sqlite:///{home}/default/store.db")
    now = time.time()
    store.ledger.add_base("agent@0", "/base", "ff", who="t", now=now - 9 * DAY_S)
    metrics = {"train": {"history": [{"seconds": 1_800.0}]}}
    trained = Policy("agent@1", "/base", "ff", "candidate", now - 3 * DAY_S, "/a", "agent@0", metrics)
    store.ledger.add_candidate(trained, trained_on=[], who="t")
    store.ledger.move("agent@1", "champion", who="t", reason="it won", now=now - 2 * DAY_S)
    store.ledger.set_engine("http://127.0.0.1:1/v1", who="t", now=now - 2 * DAY_S)
    store.ledger.set_engine(None, who="t", now=now - DAY_S)
    store.ledger.add_judgement(Judgement("j", "g", now - DAY_S, "m", "r", "score", "ok", calls=1, cost_usd=1.0))
    for index in range(80):
        policy, key, at = ("agent@1" if index < 40 else None), f"run-{index}", now - DAY_S + index
        call = Call(
            f"call-{index}", key, at, "gpt-5", ({"role": "user", "content": "hi"},),
            (Choice(0, {"role": "assistant", "content": "yo"}, "stop"),), duration_ms=100.0 + index, policy=policy,
            prompt_tokens=1_000_000, completion_tokens=100_000, fallback=EVIL if index == 79 else None,
        )  # fmt: skip
        good = index % 40 < (38 if policy else 30)
        store.write([TrajectoryInfo(key, at, "explicit"), call, Score(key, key, "reward", float(good), "user", at)])
    store.close()
    return home


PRICED = ("--upstream-price", "1.5", "5", "--gpu-usd-per-hour", "0.5")


def test_a_report_on_a_terminal(home: Path):
    done = art_patch("report", *PRICED, home=home, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    assert not [character for character in done.stdout if character in "\x1b\x07"]
    assert lines[1] == "switch"
    text = "\n".join(lines[2:])
    assert text == (
        "· by your rewards the difference to upstream is +0.200, between +0.036 and\n"
        "  +0.345: better\n"
        "· with every call it would have saved $146.75 in this time\n"
        "\n"
        "             agent@1  upstream\n"
        "calls             40        40\n"
        "share          50.0%     50.0%\n"
        "failed          0.0%      0.0%\n"
        "latency p50   119 ms    159 ms\n"
        "latency p95   137 ms    177 ms\n"
        "\n"
        "quality              agent@1     upstream  difference     95 % limits\n"
        "by your rewards  0.950 of 40  0.750 of 40      +0.200  +0.036..+0.345\n"
        "by the judge      not scored   not scored\n"
        "unscored runs              0            0\n"
        "\n"
        "money                        as it was  if ours had answered every call\n"
        "paid to upstream                $80.00                            $0.00\n"
        "not paid, for ours answered     $80.00                          $160.00\n"
        "GPU                            -$12.00                          -$12.00\n"
        "judge                           -$1.00                           -$1.00\n"
        "updates                         -$0.25                           -$0.25\n"
        "saved in all                    $66.75                          $146.75\n"
        "\n"
        "to keep in mind\n"
        "· who answered was not drawn by lot, so the runs may differ; `art-patch mode\n"
        "  canary` draws\n"
        "· calls that went upstream after all: \\x1b]0;owned\\x07 [bold red]HTTP 500[/] |\n"
        "  <b> 1"
    )


def test_a_report_as_json(home: Path):
    told = json.loads(art_patch("report", *PRICED, "--json", home=home).stdout)
    assert (told["project"], told["days"], told["verdict"]) == ("default", 7.0, "switch")
    assert [side["calls"] for side in told["sides"]] == [40, 40]
    money = told["money"]
    assert (money["saved_usd"], money["saved_if_all_usd"]) == pytest.approx((66.75, 146.75))
    reward, judged = told["comparisons"]
    assert (reward["difference"], judged["ours"], judged["low"]) == (pytest.approx(0.2), None, None)


def test_a_report_as_markdown(home: Path):
    lines = art_patch("report", *PRICED, "--markdown", home=home).stdout.splitlines()
    assert lines[0] == "# default: switch"
    assert "| by the judge | not scored | not scored |  |  |" in lines
    assert "| saved in all | $66.75 | $146.75 |" in lines
    assert lines[-1].endswith("[bold red]HTTP 500[/] \\| &lt;b> 1")


def test_values_of_an_earlier_model_of_upstreams_are_left_out_in_one_sentence(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    now = time.time()
    for index, name in enumerate(("m-1", "m-1", "m-2 [bold]fp")):
        key, at = f"run-{index}", now - 100 + index
        call = Call(
            f"call-{index}", key, at, "gpt-5", ({"role": "user", "content": "hi"},),
            (Choice(0, {"role": "assistant", "content": "yo"}, "stop"),), answered_by=name,
        )  # fmt: skip
        store.write([TrajectoryInfo(key, at, "explicit"), call, Score(key, key, "reward", 1.0, "user", at)])
    store.close()
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(now - 98))
    said = f"upstream's model changed at {when}: m-1 -> m-2 [bold]fp"
    told = json.loads(art_patch("report", "--json", home=tmp_path).stdout)
    assert told["upstream_change"] == {
        "requested_model": "gpt-5", "before": "m-1", "after": "m-2 [bold]fp", "at": pytest.approx(now - 98)
    }  # fmt: skip
    assert (told["outdated"], told["comparisons"][0]["theirs_scored"]) == (2, 1)
    shown = " ".join(art_patch("report", home=tmp_path, COLUMNS="80").stdout.split())
    assert f"{said}; the comparison leaves out what upstream did before (2 runs)" in shown
    assert f"- {said}" in art_patch("report", "--markdown", home=tmp_path).stdout


def test_what_is_not_known_is_said_and_the_verdict_rests_on_quality(home: Path):
    done = art_patch("report", home=home)
    assert "switch\n" in done.stdout and "on quality alone: what it costs is not known" in done.stdout
    assert "no price is known for gpt-5: give --upstream-price IN OUT" in done.stdout
    assert "give --gpu-usd-per-hour" in done.stdout
    assert done.stdout.count("unknown") == 9
    by_variables = {"ART_PATCH_UPSTREAM_PRICE": "1.5 5", "ART_PATCH_GPU_USD_PER_HOUR": "0.5"}
    assert "saved $146.75" in art_patch("report", home=home, **by_variables).stdout


def test_it_says_do_not_switch_when_that_is_so(home: Path):
    done = art_patch("report", "--upstream-price", "0", "0", "--gpu-usd-per-hour", "2", "--json", home=home)
    assert "cost $50.00 more" in " ".join(json.loads(done.stdout)["reasons"])
    late = json.loads(art_patch("report", "--days", "0.5", "--json", home=home).stdout)
    assert (late["verdict"], late["sides"][0]["calls"]) == ("not enough data", 0)


def test_litellm_knows_prices(home: Path):
    told = json.loads(art_patch("report", "--litellm-prices", "--gpu-usd-per-hour", "0", "--json", home=home).stdout)
    assert told["money"]["avoided_usd"] > 0
    assert told["money"]["avoided_usd"] == pytest.approx(told["money"]["upstream_usd"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--upstream-price", "nan", "1"], "no prices"),
        (["--upstream-price", "-1", "1"], "no prices"),
        (["--upstream-price", "1", "1", "--litellm-prices"], "choose one"),
        (["--markdown", "--json"], "choose one"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], why: str, home: Path):
    done = art_patch("report", *words, home=home)
    assert done.returncode == 2
    assert why in done.stdout + done.stderr


def test_without_a_store_there_is_nothing_to_report(tmp_path: Path):
    says(art_patch("report", home=tmp_path), 19, "there is no store")
    open_store(f"sqlite:///{tmp_path}/default/store.db").close()
    done = art_patch("report", home=tmp_path)
    assert "not enough data" in done.stdout and "no policy serves" in done.stdout


def test_status_and_trajectories_say_why_calls_fell_back(home: Path):
    shown = art_patch("status", home=home).stdout
    (line,) = [line.strip() for line in shown.splitlines() if "fell back:" in line]
    assert line == r"1 fell back: \x1b]0;owned\x07 [bold red]HTTP 500[/] | <b>"
    run = art_patch("trajectories", "show", "run-79", home=home).stdout
    assert r"fell back: \x1b]0;owned\x07 [bold red]HTTP 500[/] | <b>" in run
    assert not [character for character in shown + run if character in "\x1b\x07"]
    assert json.loads(art_patch("status", "--json", home=home).stdout)["recorded"]["fell_back"] == {EVIL: 1}
