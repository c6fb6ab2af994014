"""What a person may change in the browser, as the commands of the same names do, with the same words in the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from art_patch.web import cycle_actions, policy_actions, review_actions, run_actions
from art_patch.web.acting import Acting, Done


@dataclass(frozen=True, slots=True)
class Action:
    """One change: a path below the project, and the function that makes it and returns what it did, in words."""

    path: str
    act: Callable[[Acting], str | Done]
    forgets: bool = True  # whether sums over the store, as pages keep them, are wrong afterwards
    waits: bool = False  # for an engine


ACTIONS: tuple[Action, ...] = (
    Action("review/prefer", review_actions.prefer, forgets=False),
    Action("review/thumb", review_actions.thumb, forgets=False),
    Action("review/correct", review_actions.correct, forgets=False),
    Action("score-run/{id:any}", run_actions.score, forgets=False),
    Action("correct-run/{id:any}", run_actions.correct, forgets=False),
    Action("run-test/{id:any}", run_actions.add_test, forgets=False),
    Action("erase-run/{id:any}", run_actions.erase),
    Action("cycles/start", cycle_actions.start),
    Action("decide", policy_actions.decide, waits=True),
)
