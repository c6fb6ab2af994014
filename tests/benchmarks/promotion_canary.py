"""The part `canary` of `promotion.py`: a challenger turns out bad, and is gone.

Three patched apps, each in a process of its own, ask an engine over HTTP that serves one policy badly: it fails from
its first call on (`errors`), is well at first and fails then (`breaks`), takes eight times as long (`slow`), or answers
what three of ten people like instead of nine (`disliked`). It gets 20 % of the sessions; `art-patch watch` looks after
it at its own pace, in a process of its own. Every session is one call.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, closing
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

from art_patch._lib.ids import new_id
from art_patch.errors import GateRejected
from art_patch.recording import in_share
from art_patch.settings import Settings
from art_patch.store import open_store
from art_patch.types import Policy
from tests.support.benchmark_report import say
from tests.support.command_line import ENVIRONMENT
from tests.support.servers import Answer, StubServer, error, serving
from tests.support.two_apps import App

RULES = {"ART_PATCH_CANARY_REST_S": "1", "ART_PATCH_CANARY_SILENCE_S": "1", "ART_PATCH_CANARY_RAMP": "0"}
"""A session is one call here, so it has ended soon; and the share stays as it is, so that rounds can be compared."""

KINDS = ("errors", "breaks", "slow", "disliked")
ROUNDS = 3
APPS = 3
PERCENT = 20.0
USUAL_S, SLOW_S = 0.05, 0.4
WELL_S = 15.0
"""For so long a policy that `breaks` is well."""
PAUSE_S = 0.05
LIKED = {"champion": 0.9, "disliked": 0.3}
AFTER = 10
"""Calls of each app after it has left the canary."""
PATIENCE_S = 300.0


class Engine(StubServer):
    """Serves every policy, and one of them badly."""

    bad: str | None = None
    how: str = ""

    def answer(self, body: Any, path: str = "") -> Answer:
        """The answer to a request."""
        if "messages" in body:
            is_bad = body["model"] == self.bad
            if is_bad and self.how in ("errors", "breaks"):
                return error(500, "the policy cannot be used")
            time.sleep(SLOW_S if is_bad and self.how == "slow" else USUAL_S)
        return super().answer(body, path)


class Asked(NamedTuple):
    """A call: when it was answered, in which session, and by whom."""

    at: float
    session: str
    by: str


class People:
    """Who uses one app, from the moment it knows of the challenger until it has left it, and a little longer."""

    def __init__(self, app: App, challenger: str, liked: Mapping[str, float]) -> None:
        """Begin to ask."""
        self.asked: list[Asked] = []
        self.after: list[Asked] = []
        self.left_at = 0.0
        self._app, self._challenger, self._liked = app, challenger, liked
        self._rng = random.Random(new_id())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        """Wait until they are done."""
        self._thread.join()

    def _run(self) -> None:
        self._app.follows(challenger=self._challenger)
        while self._app.sees()["challenger"] == self._challenger:
            self.asked.append(self._ask())
            time.sleep(PAUSE_S)
        self.left_at = time.monotonic()
        self.after = [self._ask() for _ in range(AFTER)]

    def _ask(self) -> Asked:
        session = new_id()
        thumbs = {policy: float(self._rng.random() < chance) for policy, chance in self._liked.items()}
        by = self._app.answer(session, thumbs=thumbs)
        return Asked(time.monotonic(), session, by)


class Round(NamedTuple):
    """What became of one bad policy.

    Attributes:
        taken_s: from the moment when it turned bad until the last app had left it.
        calls: of all apps in that time.
        affected: of these, how many it answered, or failed.
        elsewhere: of these, how many were of sessions that are not the canary's.
        late: such calls after an app had left it.
    """

    taken_s: float
    calls: int
    affected: int
    elsewhere: int
    late: int


def canary(share: float) -> dict[str, Any]:
    """How long a bad challenger lasts, and whom it meets."""
    rounds = max(1, round(ROUNDS * share))
    found: dict[str, list[Round]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        place = _Place(Path(home), stack)
        for number in range(rounds * len(KINDS)):
            how = KINDS[number % len(KINDS)]
            found[how].append(place.test(f"agent@{number + 1}", how))
            say(f"canary, {how}: {found[how][-1]}")
    every = [each for some in found.values() for each in some]
    calls, affected = sum(each.calls for each in every), sum(each.affected for each in every)
    return {
        "canary_rollback_s": max(each.taken_s for each in every),
        **{f"canary_rollback_s_{how}": max(each.taken_s for each in found[how]) for how in KINDS},
        "canary_affected_share": affected / calls,
        "canary_affected_share_low": lower_end(affected, calls),
        "canary_affected_elsewhere": sum(each.elsewhere for each in every),
        "canary_late_answers": sum(each.late for each in every),
        "canary_calls": calls,
        "canary_calls_per_s": calls / sum(each.taken_s for each in every),
    }


def lower_end(found: int, of: int, z: float = 1.645) -> float:
    """The share that is surpassed with 95 % certainty (Wilson)."""
    share, wide = found / of, z * z / of
    return (share + wide / 2 - z * sqrt(share * (1 - share) / of + wide / (4 * of))) / (1 + wide)


class _Place:
    """A store with candidates, the engine, a provider, and the apps."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self._home = home
        url = f"sqlite:///{home}/default/store.db"
        self._ledger = stack.enter_context(closing(open_store(url))).ledger
        self._ledger.add_base("agent@0", "base", "0" * 64, who="benchmark")
        self._engine = Engine()
        stack.callback(self._engine.close)
        self._ledger.set_engine(self._engine.url.removesuffix("/v1"), who="benchmark")
        provider = stack.enter_context(serving())
        interval_s = Settings.model_fields["poll_interval_s"].default
        self._apps = [App(url, provider, poll_interval_s=interval_s) for _ in range(APPS)]
        for app in self._apps:
            stack.callback(app.stop)
            app.answer("first")

    def test(self, policy: str, how: str) -> Round:
        """Give a policy its share of the sessions, have it turn bad, and wait until it is gone."""
        candidate = Policy(policy, "base", "0" * 64, "candidate", time.time(), "unread", "agent@0")
        self._ledger.add_candidate(candidate, trained_on=[], who="benchmark")
        began = time.monotonic()
        if how != "breaks":
            self._engine.bad, self._engine.how = policy, how
        self._ledger.move(policy, "canary", percent=PERCENT, who="benchmark", reason=how)
        liked = {"agent@0": LIKED["champion"], policy: LIKED.get(how, LIKED["champion"])}
        people = [People(app, policy, liked) for app in self._apps]
        command = [sys.executable, "-m", "art_patch", "watch", "--act", "--json", "--home", str(self._home)]
        watch = subprocess.Popen(command, env=ENVIRONMENT | RULES, stdout=subprocess.DEVNULL)
        if how == "breaks":
            time.sleep(WELL_S)
            began = time.monotonic()
            self._engine.bad, self._engine.how = policy, how
        assert watch.wait(PATIENCE_S) == GateRejected.exit_code
        for each in people:
            each.join()
        affected_by = "upstream" if how in ("errors", "breaks") else policy
        asked = [call for each in people for call in each.asked if call.at >= began]
        met = [call for call in asked if call.by == affected_by]
        return Round(
            max(each.left_at for each in people) - began,
            len(asked),
            len(met),
            sum(not in_share(f"{policy}:{call.session}", PERCENT / 100, "challenger") for call in met),
            sum(call.by != "agent@0" for each in people for call in each.after),
        )
