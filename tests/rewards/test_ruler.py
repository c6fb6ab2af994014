"""The judge as the job uses it: the true litellm client over real HTTP against a scripted server."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from art_patch.errors import JudgeError
from art_patch.rewards import DEFAULT_RUBRIC, Judge, Rubric
from art_patch.types import Group

# litellm leaves connections to the garbage collector when threads race for a client or its cache lets one go.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def collect_litellm_connections() -> Iterator[None]:
    """Collect them here, so that they do not turn up as another module's warning."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


GroupsOf = Callable[..., list[Group]]
Serve = Callable[[Callable[[Any], Any]], Any]


def judge(server: Any, **given: Any) -> Judge:
    settings: dict[str, Any] = {"concurrency": 1, "max_retries": 2, "timeout_s": 10.0, "pause_s": 0.01, **given}
    return Judge(settings.pop("model", "openai/some-judge"), base_url=server.base_url, **settings)


def test_scores_every_sibling_with_what_the_judge_said_of_it(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, verdict_text: Any
) -> None:
    def by_answer(asked: Any) -> Any:
        return reply(verdict_text({k: int(t[-1]["content"][-1]) / 10 for k, t in asked.transcripts.items()}))

    server = judge_server(by_answer)
    rubric = Rubric("Higher is better.")
    seen: list[tuple[int, int]] = []
    report = judge(server, rubric=rubric, api_key="sk-judge").score_groups(
        groups_of(3), progress=lambda done, total: seen.append((done, total)), now=5.0
    )
    assert {s.trajectory_id: s.value for s in report.scores} == {
        f"g{g}-{i}": i / 10 for g in range(3) for i in range(3)
    }
    for score in report.scores:
        assert (score.name, score.source, score.at) == ("ruler", "ruler", 5.0)
        assert (score.rubric, score.judge) == (rubric.version, "openai/some-judge")
        assert score.group_id == score.trajectory_id[:2]
        assert score.comment == f"why {score.value if score.value else 0.0}"
    assert len({score.id for score in report.scores}) == 9
    assert report.unscored == {}
    assert (report.calls, report.prompt_tokens, report.completion_tokens) == (3, 300, 30)
    assert report.cost_usd is None  # no price list knows this model
    assert seen == [(1, 3), (2, 3), (3, 3)]

    request = server.asked[0]
    assert request.headers["authorization"] == "Bearer sk-judge"
    assert request.body["model"] == "some-judge"
    assert request.body["temperature"] == 0
    assert request.body["response_format"]["json_schema"]["strict"] is True
    assert "Higher is better." in request.body["messages"][0]["content"]


def test_judging_again_replaces_scores_and_another_rubric_stands_beside(
    judge_server: Serve, groups_of: GroupsOf, half_for_all: Any
) -> None:
    server = judge_server(half_for_all)
    first, again, other = (
        {score.id for score in judge(server, rubric=rubric).score_groups(groups_of(1)).scores}
        for rubric in (DEFAULT_RUBRIC, DEFAULT_RUBRIC, Rubric("Another."))
    )
    assert first == again
    assert not first & other


def test_the_price_is_summed_where_it_is_known(judge_server: Serve, groups_of: GroupsOf, half_for_all: Any) -> None:
    server = judge_server(half_for_all)
    report = judge(server, model="openai/gpt-5-mini").score_groups(groups_of(2))
    assert report.cost_usd is not None and 0 < report.cost_usd < 0.01
    assert "temperature" not in server.asked[0].body  # litellm knows that this model refuses it


def test_what_is_known_is_not_asked_again(judge_server: Serve, groups_of: GroupsOf, half_for_all: Any) -> None:
    server = judge_server(half_for_all)
    groups = groups_of(3)
    before = judge(server).score_groups(groups[:2]).scores
    report = judge(server).score_groups(groups, known=before[:-1])  # one sibling of g1 has none
    assert {score.group_id for score in report.scores} == {"g0", "g1", "g2"} and len(report.scores) == 9
    assert [j.group_id for j in report.judgements] != [] and report.calls == 2
    everything = judge(server).score_groups(groups, known=report.scores)
    assert (everything.calls, everything.judgements, len(everything.scores)) == (0, (), 9)
    for other in (judge(server, rubric=Rubric("Another.")), judge(server, model="openai/another-judge")):
        assert other.score_groups(groups, known=report.scores).calls == 3


def test_each_group_is_handed_over_as_soon_as_it_is_judged(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any
) -> None:
    bad = reply("no")
    server = judge_server(lambda asked: bad if "question 1" in str(asked.body) else half_for_all(asked))
    seen: list[tuple[str, int, int, str]] = []
    judgements: list[Any] = []

    def on_scored(group: Group, scores: Any, usage: Any) -> None:
        seen.append((group.id, len(scores), usage.calls, threading.current_thread().name))

    report = judge(server, concurrency=2).score_groups(
        groups_of(4), on_scored=on_scored, on_judgement=judgements.append
    )
    assert sorted(seen) == [(name, 3, 1, threading.current_thread().name) for name in ("g0", "g2", "g3")]
    assert tuple(judgements) == report.judgements


def test_a_kill_loses_only_what_was_under_way(judge_server: Serve, groups_of: GroupsOf, half_for_all: Any) -> None:
    server, kept, groups = judge_server(half_for_all), list[Any](), groups_of(10)

    def keep(_group: Group, scores: Any, _usage: Any) -> None:
        kept.extend(scores)
        if len(kept) == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(server).score_groups(groups, on_scored=keep)
    report = judge(server).score_groups(groups, known=kept)
    assert report.calls == 6 and len(report.scores) == 30


def test_what_each_group_took_is_reported(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any
) -> None:
    server = judge_server(lambda asked: reply("no") if "question 1" in str(asked.body) else half_for_all(asked))
    report = judge(server, model="openai/gpt-5-mini").score_groups(groups_of(2), purpose="gate", now=7.0)
    good, bad = sorted(report.judgements, key=lambda judgement: judgement.group_id)
    assert (good.state, good.reason, good.calls, good.prompt_tokens, good.completion_tokens) == ("ok", None, 1, 100, 10)
    assert (bad.state, bad.calls, bad.prompt_tokens) == ("failed", 2, 200)
    assert bad.reason == report.unscored["g1"]
    assert good.cost_usd and bad.cost_usd == pytest.approx(2 * good.cost_usd)
    assert (good.judge, good.rubric, good.purpose, good.at) == (
        "openai/gpt-5-mini", DEFAULT_RUBRIC.version, "gate", 7.0,
    )  # fmt: skip
    assert good.facts == {"order": "shuffled", "attempts": 3, "parts": 1}
    assert good.id != bad.id


def test_a_second_pass_shows_the_reverse_order(judge_server: Serve, groups_of: GroupsOf, half_for_all: Any) -> None:
    server = judge_server(half_for_all)
    groups = groups_of(1, siblings=6)
    for order in ("shuffled", "reversed"):
        judge(server).score_groups(groups, order=order)
    there, back = ([t[-1]["content"] for t in asked.transcripts.values()] for asked in server.asked)
    assert there == back[::-1]


def test_a_large_group_is_judged_in_parts_on_one_scale(
    judge_server: Serve, group_of: Any, reply: Any, verdict_text: Any
) -> None:
    """A judge whose scale shifts with each question, as those of LLMs do: the merged order is the true one."""

    def shifted(asked: Any) -> Any:
        quality = {key: int(t[-1]["content"]) / 20 for key, t in asked.transcripts.items()}
        shift = 0.1 * (asked.number % 3)
        return reply(verdict_text({key: round(value * 0.7 + shift, 6) for key, value in quality.items()}))

    server = judge_server(shifted)
    transcripts = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": str(i)}] for i in range(20)]
    report = judge(server).score_groups([group_of(transcripts)])
    assert report.calls == len(server.asked) == 3
    assert report.judgements[0].facts["parts"] == 3
    assert all(len(asked.ids) == 8 for asked in server.asked)
    value = {int(score.trajectory_id[2:]): score.value for score in report.scores}
    ordered = sorted(value, key=lambda i: value[i])
    assert sum(abs(place - i) for place, i in enumerate(ordered)) <= 10


def test_a_part_that_fails_leaves_the_whole_group_unscored(
    judge_server: Serve, group_of: Any, reply: Any, half_for_all: Any
) -> None:
    server = judge_server(lambda asked: half_for_all(asked) if asked.number == 0 else reply("no"))
    transcripts = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": str(i)}] for i in range(10)]
    told: list[Any] = []
    with pytest.raises(JudgeError, match="no valid verdict"):
        judge(server).score_groups([group_of(transcripts)], on_scored=lambda *given: told.append(given))
    assert told == []


def test_a_group_too_long_for_the_judge_is_named_with_the_reason(
    judge_server: Serve, groups_of: GroupsOf, half_for_all: Any
) -> None:
    server = judge_server(half_for_all)
    with pytest.raises(JudgeError, match="too long for the judge: rubric and tools alone take"):
        judge(server, max_prompt_tokens=100).score_groups(groups_of(1))
    assert server.asked == []


@pytest.mark.parametrize("model", ["openai/some-judge", "hosted_vllm/mine"])
def test_a_judge_that_reads_less_than_we_thought_is_asked_in_smaller_parts(
    judge_server: Serve, group_of: Any, reply: Any, half_for_all: Any, model: str
) -> None:
    limit = 14_000  # characters

    def short_sighted(asked: Any) -> Any:
        if sum(len(message["content"]) for message in asked.body["messages"]) <= limit:
            return half_for_all(asked)
        said = "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens."
        return reply(said, status=400)

    server = judge_server(short_sighted)
    question = {"role": "user", "content": "q"}
    groups = [
        group_of(
            [[question, {"role": "assistant", "content": f"{i} " + "a word, " * 500}] for i in range(6)], name=name
        )
        for name in ("g", "h")
    ]
    report = judge(server, model=model).score_groups(groups)
    assert len(report.scores) == 12
    assert [judgement.facts["parts"] > 1 for judgement in report.judgements] == [True, True]
    refusals = sum(1 for asked in server.asked if len(asked.body["messages"][1]["content"]) > limit)
    assert refusals <= 2  # the second group profits from what the first found out
    assert report.calls == len(server.asked)


def test_a_vllm_of_ones_own_is_asked_by_its_name(judge_server: Serve, groups_of: GroupsOf, half_for_all: Any) -> None:
    server = judge_server(half_for_all)
    report = judge(server, model="hosted_vllm/Qwen/Qwen3-32B").score_groups(groups_of(1))
    assert len(report.scores) == 3
    assert server.asked[0].body["model"] == "Qwen/Qwen3-32B"


def test_the_same_transcripts_are_sent_once_and_score_the_same(
    judge_server: Serve, group_of: Any, reply: Any, verdict_text: Any
) -> None:
    server = judge_server(lambda asked: reply(verdict_text({k: i / 4 for i, k in enumerate(asked.ids)})))
    question = {"role": "user", "content": "q"}
    same, other = [question, {"role": "assistant", "content": "a"}], [question, {"role": "assistant", "content": "b"}]
    report = judge(server).score_groups([group_of([same, other, same, same])])
    value = {score.trajectory_id: score.value for score in report.scores}
    assert len(server.asked[0].ids) == 2
    assert value["g-0"] == value["g-2"] == value["g-3"] != value["g-1"]


BAD = {
    "prose": lambda ids: "They are all fine.",
    "empty": lambda ids: "",
    "bad JSON": lambda ids: '{"scores": [',
    "missing id": lambda ids: {k: 0.5 for k in ids[1:]},
    "unknown id": lambda ids: {**dict.fromkeys(ids, 0.5), "zzzzzz": 0.5},
    "out of range": lambda ids: dict.fromkeys(ids, 7),
    "NaN": lambda ids: dict.fromkeys(ids, float("nan")),
    "text": lambda ids: dict.fromkeys(ids, "0.8x"),
    "boolean": lambda ids: dict.fromkeys(ids, True),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_an_invalid_answer_gets_one_repair_try(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, verdict_text: Any, half_for_all: Any, bad: Any
) -> None:
    def second_time_right(asked: Any) -> Any:
        if asked.number > 0:
            return half_for_all(asked)
        said = bad(asked.ids)
        return reply(said if isinstance(said, str) else verdict_text(said))

    server = judge_server(second_time_right)
    report = judge(server).score_groups(groups_of(1))
    assert [score.value for score in report.scores] == [0.5] * 3
    assert report.calls == len(server.asked) == 2
    repair = server.asked[1].body["messages"]
    assert [message["role"] for message in repair] == ["system", "user", "assistant", "user"]
    assert "cannot be used" in repair[3]["content"]
    assert all(name in repair[3]["content"] for name in server.asked[0].ids)
    assert repair[2]["content"]


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_group_that_stays_invalid_is_named_and_gets_no_score(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, verdict_text: Any, half_for_all: Any, bad: Any
) -> None:
    def never_right_for_g1(asked: Any) -> Any:
        if "question 1" not in asked.body["messages"][1]["content"]:
            return half_for_all(asked)
        said = bad(asked.ids)
        return reply(said if isinstance(said, str) else verdict_text(said))

    report = judge(judge_server(never_right_for_g1)).score_groups(groups_of(3))
    assert {score.group_id for score in report.scores} == {"g0", "g2"}
    assert list(report.unscored) == ["g1"]
    assert report.unscored["g1"].startswith("no valid verdict in two tries: ")
    assert report.calls == 4


def test_a_duplicate_id_is_refused_and_fenced_json_is_read(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, verdict_text: Any, half_for_all: Any
) -> None:
    def respond(asked: Any) -> Any:
        text = half_for_all(asked).text
        twice = f'}}, {{"trajectory_id": "{asked.ids[0]}", "explanation": "", "score": 1}}]'
        return reply(text.replace("}]", twice) if asked.number == 0 else f"```json\n{text}\n```")

    server = judge_server(respond)
    report = judge(server).score_groups(groups_of(1))
    assert [score.value for score in report.scores] == [0.5] * 3
    assert "more than once" in server.asked[1].body["messages"][3]["content"]


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503])
def test_what_passes_is_tried_again(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any, status: int
) -> None:
    server = judge_server(lambda asked: reply(status=status) if asked.number < 2 else half_for_all(asked))
    report = judge(server).score_groups(groups_of(1))
    assert len(report.scores) == 3
    assert report.calls == len(server.asked) == 3


@pytest.mark.parametrize("body", [b"<html>busy</html>", b"{}", b'{"choices": []}', b""])
def test_a_success_that_is_no_completion_is_tried_again(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any, body: bytes
) -> None:
    server = judge_server(lambda asked: reply(body=body) if asked.number == 0 else half_for_all(asked))
    assert len(judge(server).score_groups(groups_of(1)).scores) == 3


def test_an_answer_that_takes_too_long_is_asked_for_again(
    judge_server: Serve, groups_of: GroupsOf, half_for_all: Any
) -> None:
    def late_at_first(asked: Any) -> Any:  # and right, so that whoever waits asks once
        return replace(half_for_all(asked), delay_s=4.0 if asked.number == 0 else 0.0)

    report = judge(judge_server(late_at_first), timeout_s=1.5).score_groups(groups_of(1))
    assert (len(report.scores), report.calls) == (3, 2)


def test_the_pause_that_the_server_asks_for_is_kept(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any
) -> None:
    busy = reply(status=429, headers={"retry-after": "0.4"})
    server = judge_server(lambda asked: busy if asked.number == 0 else half_for_all(asked))
    judge(server).score_groups(groups_of(1))
    assert server.asked[1].at - server.asked[0].at >= 0.4


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_judge_that_refuses_us_is_not_asked_for_every_group(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, status: int
) -> None:
    server = judge_server(lambda asked: reply("go away", status=status))
    with pytest.raises(JudgeError, match="go away") as caught:
        judge(server).score_groups(groups_of(20))
    assert len(server.asked) <= 4
    message = str(caught.value)
    assert server.base_url in message
    assert all(name in message for name in ("ART_PATCH_JUDGE", "ART_PATCH_JUDGE_BASE_URL", "ART_PATCH_JUDGE_API_KEY"))


def test_a_judge_that_dies_half_way_leaves_the_scores_it_gave(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any
) -> None:
    server = judge_server(lambda asked: half_for_all(asked) if asked.number < 2 else reply(status=500))
    report = judge(server, max_retries=1).score_groups(groups_of(20))
    assert {score.group_id for score in report.scores} == {"g0", "g1"}
    assert set(report.unscored) == {f"g{i}" for i in range(2, 20)}
    assert "status 500" in report.unscored["g2"]
    assert report.unscored["g19"].startswith("not tried")
    assert report.calls == len(server.asked) <= 2 + 2 * 4


def test_a_question_that_the_judge_refuses_costs_only_its_own_group(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any
) -> None:
    refused = reply("this content is not allowed", status=400)
    server = judge_server(lambda asked: half_for_all(asked) if asked.number >= 5 else refused)
    report = judge(server).score_groups(groups_of(6))
    assert {score.group_id for score in report.scores} == {"g5"}
    assert all("not allowed" in reason for reason in report.unscored.values())
    assert report.calls == 6


def test_an_unreachable_judge_is_an_error(judge_server: Serve, groups_of: GroupsOf) -> None:
    nobody = Judge("openai/x", base_url="http://127.0.0.1:9/v1", max_retries=1, pause_s=0.01, timeout_s=1.0)
    with pytest.raises(JudgeError, match="Connection error"):
        nobody.score_groups(groups_of(10))


def test_an_unknown_provider_is_an_error(groups_of: GroupsOf) -> None:
    with pytest.raises(JudgeError, match="LLM Provider NOT provided"):
        Judge("no-such-provider/x").score_groups(groups_of(2))


@pytest.mark.parametrize("wish", ["response_format", "temperature"])
def test_a_server_that_refuses_a_wish_is_asked_without_it(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any, wish: str
) -> None:
    def refuse(asked: Any) -> Any:
        return reply(f"unsupported: '{wish}'", status=400) if wish in asked.body else half_for_all(asked)

    server = judge_server(refuse)
    report = judge(server).score_groups(groups_of(3))
    assert len(report.scores) == 9
    assert [wish in asked.body for asked in server.asked] == [True, False, False, False]


@pytest.mark.parametrize("model", [None, ""])
def test_no_judge_says_how_to_name_one(model: str | None) -> None:
    with pytest.raises(JudgeError, match=r"ART_PATCH_JUDGE or --judge.*ART_PATCH_JUDGE=openai/"):
        Judge(model)


def test_no_groups_no_questions(groups_of: GroupsOf) -> None:
    report = Judge("openai/x", base_url="http://127.0.0.1:9/v1").score_groups([])
    assert (report.scores, report.unscored, report.calls) == ((), {}, 0)


def test_groups_are_judged_side_by_side(judge_server: Serve, groups_of: GroupsOf, half_for_all: Any) -> None:
    barrier = threading.Barrier(4, timeout=20)

    def all_four_at_once(asked: Any) -> Any:
        barrier.wait()
        return half_for_all(asked)

    report = judge(judge_server(all_four_at_once), concurrency=4).score_groups(groups_of(8))
    assert len(report.scores) == 24


def test_an_interrupted_run_stops_asking(judge_server: Serve, groups_of: GroupsOf, half_for_all: Any) -> None:
    server = judge_server(half_for_all)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(server, concurrency=2).score_groups(groups_of(50), progress=interrupt)
    asked = len(server.asked)
    assert asked < 40
    time.sleep(0.1)
    assert len(server.asked) == asked


def test_a_local_judge_is_not_sent_the_key_of_the_provider(
    judge_server: Serve, groups_of: GroupsOf, half_for_all: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-real")
    server = judge_server(half_for_all)
    judge(server).score_groups(groups_of(1))
    assert "sk-real" not in str(server.asked[0].headers)


def test_litellm_keeps_quiet(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(JudgeError):
        judge(judge_server(lambda asked: reply(status=500))).score_groups(groups_of(1))
    assert capfd.readouterr() == ("", "")


def test_importing_rewards_loads_nothing_heavy() -> None:
    heavy = {"litellm", "openai", "tenacity", "torch", "httpx"}
    code = f"import art_patch.rewards, sys; print(*sys.modules.keys() & {heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
