"""The budget by itself, and the judge under it over real HTTP."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from art_patch.errors import ConfigError, JudgeError
from art_patch.rewards import Budget, Judge
from art_patch.rewards.judge.client import BudgetUsedUp
from art_patch.types import Group, Judgement

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

GroupsOf = Callable[..., list[Group]]
Serve = Callable[[Callable[[Any], Any]], Any]
PRICED = "openai/gpt-5-mini"


@pytest.fixture(scope="module", autouse=True)
def collect_litellm_connections() -> Iterator[None]:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def judge(server: Any, budget: Budget, **given: Any) -> Judge:
    settings: dict[str, Any] = {"model": PRICED, "concurrency": 1, "timeout_s": 10.0, "pause_s": 0.01, **given}
    return Judge(settings.pop("model"), base_url=server.base_url, budget=budget, **settings)


def test_calls_are_counted_when_they_are_allowed() -> None:
    budget = Budget(max_calls=2)
    for _ in range(2):
        budget.settle(budget.reserve(None), None)
    with pytest.raises(BudgetUsedUp, match="2 of 2 calls"):
        budget.reserve(None)
    assert budget.calls == 2


def test_money_is_held_while_requests_are_under_way() -> None:
    budget = Budget(max_usd=1.0)
    budget.settle(budget.reserve(0.25), 0.25)
    first, second = budget.reserve(0.25), budget.reserve(0.25)
    budget.settle(budget.reserve(0.25), 0.0)  # refused: it cost nothing
    budget.settle(first, 0.0)
    budget.settle(second, None)  # nobody knows: it counts as expected
    assert budget.spent_usd == pytest.approx(0.5)
    budget.reserve(0.5)
    with pytest.raises(BudgetUsedUp, match=r"\$0.5 of \$1 were spent, \$0.5 are held"):
        budget.reserve(0.01)


def test_a_request_is_expected_to_be_as_dear_as_the_dearest_so_far() -> None:
    budget = Budget(max_usd=1.0)
    budget.settle(budget.reserve(0.1), 0.4)
    budget.settle(budget.reserve(0.1), 0.1)
    with pytest.raises(BudgetUsedUp, match=r"expected to cost \$0.8"):
        budget.reserve(0.2)


def test_until_a_price_is_known_requests_go_one_at_a_time() -> None:
    budget, allowed = Budget(max_usd=1.0), threading.Event()
    first = budget.reserve(0.1)
    refused: list[str] = []

    def ask() -> None:
        try:
            budget.reserve(0.1)
        except BudgetUsedUp as error:
            refused.append(str(error))
        allowed.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert not allowed.wait(0.1)
    budget.settle(first, 0.7)  # seven times what was thought: the second would be too much
    thread.join()
    assert len(refused) == 1


@pytest.mark.parametrize("limits", [{"max_usd": -1.0}, {"max_calls": -1}, {"max_usd": float("nan")}])
def test_impossible_limits_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="0 or more"):
        Budget(**limits)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_calls_never_go_over_the_limit_and_the_rest_waits(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any, concurrency: int
) -> None:
    server = judge_server(lambda asked: reply(status=500) if asked.number % 3 == 1 else half_for_all(asked))
    report = judge(server, Budget(max_calls=7), concurrency=concurrency).score_groups(groups_of(20))
    # What the server refused was asked again, and uses up nothing.
    refused = sum(asked.number % 3 == 1 for asked in server.asked)
    assert len(server.asked) - refused == 7 and report.calls == len(server.asked)
    assert len(report.scores) == 21
    assert len(report.unscored) == 13
    assert all(reason.startswith("budget used up: 7 of 7 calls were made") for reason in report.unscored.values())


@pytest.mark.parametrize("concurrency", [1, 8])
def test_money_is_not_overrun_by_more_than_a_call(
    judge_server: Serve, groups_of: GroupsOf, half_for_all: Any, concurrency: int
) -> None:
    server = judge_server(half_for_all)
    one = judge(server, Budget()).score_groups(groups_of(1)).cost_usd
    assert one is not None
    for calls in (2.5, 5.5):
        report = judge(server, Budget(max_usd=one * calls), concurrency=concurrency).score_groups(groups_of(30))
        assert report.cost_usd is not None and report.cost_usd <= one * (calls + 1)
        assert all("budget used up: $" in reason for reason in report.unscored.values())


def test_a_budget_for_nothing_is_no_error_and_asks_nothing(
    judge_server: Serve, groups_of: GroupsOf, half_for_all: Any
) -> None:
    server = judge_server(half_for_all)
    for budget in (Budget(max_calls=0), Budget(max_usd=0.0)):
        report = judge(server, budget).score_groups(groups_of(3))
        assert (report.scores, len(report.unscored), report.calls) == ((), 3, 0)
    assert server.asked == []


def test_a_limit_in_money_needs_a_known_price(judge_server: Serve, groups_of: GroupsOf, half_for_all: Any) -> None:
    server = judge_server(half_for_all)
    with pytest.raises(JudgeError, match=r"price of hosted_vllm/mine is unknown.*--max-calls"):
        judge(server, Budget(max_usd=1.0), model="hosted_vllm/mine").score_groups(groups_of(1))
    assert server.asked == []
    report = judge(server, Budget(max_calls=1), model="hosted_vllm/mine").score_groups(groups_of(2))
    assert len(report.scores) == 3 and report.cost_usd is None


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("max_calls", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"status": 401, "body": b'{"error": {"message": "no such key"}}'}, "no such key"),
        ({"status": 503, "body": b'{"error": {"message": "out of order"}}'}, "out of order"),
        ({"text": "They are all fine."}, "no valid verdict"),
    ],
)
def test_a_judge_that_never_answers_is_an_error_whatever_the_budget(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, broken: Any, words: str, max_calls: int, concurrency: int
) -> None:
    server = judge_server(lambda asked: reply(**broken))
    kept: list[Judgement] = []
    chief = judge(server, Budget(max_calls=max_calls), concurrency=concurrency, max_retries=3)
    with pytest.raises(JudgeError, match=words) as raised:
        chief.score_groups(groups_of(9), on_judgement=kept.append)
    assert "ART_PATCH_JUDGE_API_KEY" in str(raised.value)
    assert len(server.asked) <= (max_calls if "text" in broken else 9 * 4)  # each group four times, if it is refused
    assert len(kept) == 9 and all(one.state == "failed" for one in kept)


def test_a_repair_that_the_budget_does_not_allow_leaves_the_group_unscored(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any
) -> None:
    server = judge_server(lambda asked: half_for_all(asked) if asked.number == 0 else reply("no JSON"))
    report = judge(server, Budget(max_calls=2)).score_groups(groups_of(2))
    assert len(report.scores) == 3
    (reason,) = report.unscored.values()
    assert reason.startswith("budget used up: 2 of 2 calls were made; the answer before was no valid verdict: ")


@pytest.mark.parametrize("concurrency", [1, 4])
def test_what_the_judge_refuses_uses_up_no_budget(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any, concurrency: int
) -> None:
    out = reply(status=503, body=b'{"error": {"message": "out of order"}}')
    server = judge_server(lambda asked: half_for_all(asked) if asked.number >= 4 else out)
    budget = Budget(max_calls=2)
    report = judge(server, budget, concurrency=concurrency, max_retries=5).score_groups(groups_of(3))
    assert (len(report.scores), budget.calls, len(server.asked)) == (6, 2, 6)
    (reason,) = report.unscored.values()
    assert reason.startswith("budget used up: 2 of 2 calls were made")


def test_an_answer_that_comes_too_late_uses_up_budget(
    judge_server: Serve, groups_of: GroupsOf, reply: Any, half_for_all: Any
) -> None:
    """The server may have computed it, and will charge for it."""
    server = judge_server(lambda asked: half_for_all(asked) if asked.number == 0 else reply(delay_s=1.0))
    report = judge(server, Budget(max_calls=2), timeout_s=0.2, max_retries=5).score_groups(groups_of(3))
    assert len(report.scores) == 3
    late, waiting = sorted(report.unscored.values(), key=len, reverse=True)
    assert late.startswith("budget used up: 2 of 2 calls were made; no answer before: ")
    assert waiting == "budget used up: 2 of 2 calls were made"


def test_one_budget_holds_for_several_rounds(judge_server: Serve, groups_of: GroupsOf, half_for_all: Any) -> None:
    server = judge_server(half_for_all)
    chief = judge(server, Budget(max_calls=3))
    assert [chief.score_groups(groups_of(2)).calls for _ in range(3)] == [2, 1, 0]
