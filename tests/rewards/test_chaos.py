"""A judge that fails three times in ten, in every way, and cron that comes again: the true store, client and HTTP."""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from art_patch.errors import JudgeError
from art_patch.rewards import Budget, Judge
from art_patch.store import open_store
from art_patch.types import Group, Score

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

GROUPS = 30
CALLS_A_RUN = 25
JUDGE = "openai/gpt-5-mini"
USD_A_RUN = 0.006
USD_A_CALL = 100 * 0.25e-6 + 10 * 2e-6
"""What the scripted judge says it used, at the price that litellm knows."""


@pytest.fixture(scope="module", autouse=True)
def collect_litellm_connections() -> Iterator[None]:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


class Chaos:
    """Gives each attempt the number in its answer; a share of the requests goes wrong, in all ways alike."""

    WAYS = ("429", "500", "503", "timeout", "html", "bad JSON", "missing id", "duplicate id", "score 7")

    def __init__(self, reply: Any, verdict_text: Callable[[dict[str, Any]], str], *, share: float) -> None:
        self._reply, self._verdict_text, self._share = reply, verdict_text, share
        self._rng, self._lock = random.Random(7), threading.Lock()
        self.went_wrong: dict[str, int] = dict.fromkeys(self.WAYS, 0)
        self.billed = 0

    def __call__(self, asked: Any) -> Any:
        with self._lock:
            way = self._rng.choice(self.WAYS) if self._rng.random() < self._share else ""
            if way:
                self.went_wrong[way] += 1
            self.billed += way not in ("429", "500", "503", "html")  # who answers too late was still paid for
        scores: dict[str, Any] = {key: int(t[-1]["content"][-1]) / 10 for key, t in asked.transcripts.items()}
        first = next(iter(scores))
        right = self._verdict_text(scores)
        match way:
            case "429" | "500" | "503":
                return self._reply(status=int(way))
            case "timeout":
                return self._reply(right, delay_s=1.0)
            case "html":
                return self._reply(body=b"<html>bad gateway</html>")
            case "bad JSON":
                return self._reply(right[:-3])
            case "missing id":
                return self._reply(self._verdict_text({key: scores[key] for key in scores if key != first}))
            case "duplicate id":
                return self._reply(
                    right.replace("]}", f', {{"trajectory_id": "{first}", "explanation": "", "score": 1}}]}}')
                )
            case "score 7":
                return self._reply(self._verdict_text({**scores, first: 7}))
            case _:
                return self._reply(right)


def run_as_cron(store: Any, judge: Judge) -> None:
    """One run: judge what waits, keep each group's scores at once."""

    def keep(group: Group, scores: Sequence[Score], _usage: Any) -> None:
        store.write(scores)
        store.ledger.set_groups([group.id], "scored")

    with suppress(JudgeError):  # the next run tries again
        judge.score_groups(store.read.groups(state="formed", held_out=False), on_scored=keep)


LIMITS = {"calls": {"max_calls": CALLS_A_RUN}, "USD": {"max_usd": USD_A_RUN}}


@pytest.mark.parametrize(("limit", "concurrency"), [("calls", 1), ("calls", 6), ("USD", 6)])
def test_every_group_is_scored_in_the_end_and_never_wrongly(
    judge_server: Any,
    groups_of: Any,
    reply: Any,
    verdict_text: Any,
    tmp_path: Path,
    record_property: Any,
    limit: str,
    concurrency: int,
) -> None:
    chaos = Chaos(reply, verdict_text, share=0.3)
    server = judge_server(chaos)
    store = open_store(f"sqlite:///{tmp_path}/store.db")
    groups: list[Group] = groups_of(GROUPS, siblings=4)
    store.write([record for g in groups for t in g.trajectories for record in (t.info, *t.calls)])
    store.ledger.add_groups(groups)

    runs, overrun = 0, 0.0
    while store.read.groups(state="formed", held_out=False):
        runs += 1
        assert runs <= 20
        judge = Judge(
            JUDGE, base_url=server.base_url, api_key="none", concurrency=concurrency,
            max_retries=2, timeout_s=0.5, pause_s=0.01, budget=Budget(**LIMITS[limit]),
        )  # fmt: skip
        before = chaos.billed
        run_as_cron(store, judge)
        most = CALLS_A_RUN if limit == "calls" else USD_A_RUN / USD_A_CALL
        overrun = max(overrun, chaos.billed - before - most)

    stored = [
        (score, trajectory)
        for group in store.read.groups(state="scored")
        for trajectory in group.trajectories
        for score in trajectory.scores
    ]
    store.close()
    invalid = [score for score, t in stored if score.value != int(t.calls[0].choices[0].message["content"][-1]) / 10]
    assert len(stored) == GROUPS * 4
    assert invalid == []
    assert overrun <= 1
    wrong = sum(chaos.went_wrong.values())
    assert wrong > 0.15 * len(server.asked)
    failed = f"{wrong} of {len(server.asked)} requests failed, {runs} runs"
    name = f"judge chaos, limit in {limit}, {concurrency} at once: {failed}"
    record_property(
        "figure",
        (
            name,
            f"{len(invalid)} invalid, overrun {overrun:g} calls, unscored {GROUPS - len(stored) // 4}",
            "0, <= 1, 0",
        ),
    )
