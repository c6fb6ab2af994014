"""What a person may change in the browser, as the commands of the same names do, with the same words in the ledger.

Scores and corrections are kept as `art_patch.score()`, `art_patch.correct()` and feedback links keep them. Those of the
page for reviews have an id made of what they are about, so that a second answer replaces the first; the ledger has no
entry of them, and their comment names the person. An erasure is that of `art-patch erase`. A suite is a file of the
user's, which `ART_PATCH_SUITE` names: if this server was started with it, a test is appended to it, and otherwise the
page only has the line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args
from urllib.parse import urlencode

from pydantic import Field
from pydantic_core import from_json

from art_patch import context, feedback, gate, insights
from art_patch._lib.ids import derived_id, new_id
from art_patch._lib.words import visible
from art_patch.errors import ConfigError, NotFound
from art_patch.trajectories import main_call
from art_patch.types import JSON, Call, Correction, Score, Trajectory
from art_patch.web import cycles, policies, review
from art_patch.web.projects import Asked, Project, Query
from art_patch.web.run import GONE, run_of, why_not_learned
from art_patch.web.templates import key_of_field

SUITE = "ART_PATCH_SUITE"

_FILLERS = frozenset(" \u115f\u1160\u3164\uffa0")  # letters that look like a space


@dataclass(frozen=True, slots=True)
class Acting:
    """A change that a browser asks for: the project, the ids in the path, and the form."""

    project: Project
    ids: Mapping[str, str]
    form: Mapping[str, str]
    now: float

    @property
    def person(self) -> str:
        """The person's name, as the form has it."""
        return self.text("who", "say who you are: the ledger notes it", most=100)

    def key(self, field: str) -> str:
        """Return the id that a field has, as `templates.segment` wrote it."""
        return key_of_field(self.form.get(field, ""))

    def text(self, field: str, missing: str | None = None, *, most: int = 2_000) -> str:
        """Return one line of the form, of characters that people see; `ConfigError` says `missing` if there is none."""
        line = " ".join(self.form.get(field, "").split())[:most]
        if visible(line) != line or not (line.isprintable() and set(line) - _FILLERS):
            line = ""
        if not line and missing is not None:
            raise ConfigError(missing)
        return line

    def who(self, what: str) -> str:
        """Return the person's name and the change, as the ledger notes them."""
        return f"{self.person} (art-patch web: {what})"

    def comment(self) -> str | None:
        """Return the comment of the form."""
        return feedback.comment_of(self.form.get("comment"))

    def answer(self) -> str:
        """Return the right answer, as the person wrote it."""
        return self.form.get("answer", "").replace("\r\n", "\n")


@dataclass(frozen=True, slots=True)
class Done:
    """What a change did, in words, and the page below the project that shows it; else it is the page of the form."""

    words: str
    then: str | None = None


# --- the page of a run ---


def score(acting: Acting) -> Done:
    """Keep a score; a second one of the same person and name replaces the first."""
    who, name = acting.person, " ".join(acting.form.get("name", "").split())[:100]
    if not name:
        raise ConfigError("a score needs a name, such as thumbs or reward")
    run, value, comment = acting.ids["id"], feedback.value_of(name, acting.form.get("value")), acting.comment()
    key = derived_id("web", run, name, who)
    acting.project.keep_opinion(Score(key, run, name, value, "user", acting.now, comment=comment, judge=who))
    return Done(f"scored: {name} {value:g}")


def correct(acting: Acting) -> Done:
    """Keep the right answer to a call."""
    who, answer = acting.person, cast("Any", acting.answer())
    if acting.form.get("how") == "json":
        try:
            answer = from_json(answer)
        except ValueError as error:  # or nested deeper than records are kept
            raise ConfigError(f"the answer is not JSON ({error})") from None
        if not isinstance(answer, dict):
            raise ConfigError("the answer is an assistant message as a JSON object")
    message, said = context.assistant_message(answer), acting.comment()
    comment = f"{said} ({who})" if said else f"by {who}"
    run, call = acting.ids["id"], acting.key("call") or None
    found = acting.project.store.read.trajectories([run])
    if call is not None and call not in {each.id for its in found for each in its.calls}:
        raise NotFound("the run has no such call")
    acting.project.keep_opinion(Correction(new_id(), run, acting.now, "user", message, call_id=call, comment=comment))
    return Done("the correction is kept; `art-patch export` writes it as the answer to learn")


def erasure_facts(asked: Asked) -> JSON:
    """Return what an erasure of the run would delete, and where copies of it are; nothing is deleted."""
    key = asked.ids["id"]
    report = insights.erase(asked.settings, asked.store, trajectory=key, dry_run=True)
    if not report.erasure.found:
        raise NotFound(GONE)
    return report.facts() | {"run": key, "lines": report.lines(now=asked.now)}


def erase(acting: Acting) -> Done:
    """Erase the run, and return what was deleted and what is left to do."""
    project, key = acting.project, acting.ids["id"]
    report = insights.erase(project.settings, project.store, trajectory=key, who=acting.who("erase"))
    return Done("\n".join(report.lines(now=acting.now)), then="runs")


class SuiteQuery(Query):
    """Which call becomes a test."""

    call: str | None = Field(None, description="Id of the call; by default the last one of the longest conversation.")


def suite_facts(asked: Asked) -> JSON:
    """Return the line of a suite that asks every candidate the prompt of a call of the run."""
    run = run_of(asked.store, asked.ids["id"])
    call, row = _row(run, asked.query.call)
    about = {"file": os.environ.get(SUITE), "why_not": why_not_learned(asked.store, run)}
    return {"run": run.id, "call": call.id, "row": row, "line": json.dumps(row), **about}


def add_test(acting: Acting) -> Done:
    """Append the prompt of a call to the suite that this server was started with."""
    file, opened = os.environ.get(SUITE), acting.project.store
    if not file:
        raise ConfigError(f"this server knows no suite; start it with {SUITE}=FILE, or take the line yourself")
    run = run_of(opened, acting.ids["id"])
    if (why_not := why_not_learned(opened, run)) is not None:
        raise ConfigError(f"the gate may not use this run: {why_not}")
    _, row = _row(run, acting.key("call") or None)
    if name := " ".join(acting.form.get("name", "").split())[:200]:
        row["name"] = name
    number = gate.add_to_suite(Path(file), row)
    return Done(f"added {row['name']} to {file}, which has {number} prompts now")


def _row(run: Trajectory, wanted: str | None) -> tuple[Call, dict[str, Any]]:
    call = main_call(run) if wanted is None else next((each for each in run.calls if each.id == wanted), None)
    if call is None:
        raise NotFound("the run has no such call" if wanted else "the run has no call, so there is nothing to ask")
    return call, gate.suite_row(call, name=f"{run.id}-{run.calls.index(call) + 1}")


# --- the page for reviews ---

_CHOICES = {
    "left": ((1.0, "better than its sibling"), (0.0, "worse than its sibling")),
    "right": ((0.0, "worse than its sibling"), (1.0, "better than its sibling")),
    "tie": ((0.5, "as good as its sibling"), (0.5, "as good as its sibling")),
}


def prefer(acting: Acting) -> Done:
    """Keep which of a group's two runs is better: 1 for it and 0 for the other, or 0.5 for both."""
    form, group = acting.form, acting.key("group")
    runs, choice = [acting.key("left"), acting.key("right")], form.get("choice", "")
    pair = review.pair_of(acting.project.store, group)
    if pair is None or [pair.left, pair.right] != runs:
        raise NotFound("these two runs are not the pair of this group any more; load the page again")
    if choice not in _CHOICES:
        raise ConfigError("say which of the two is better: left, right or tie")
    for run, (value, about) in zip(runs, _CHOICES[choice], strict=True):
        _keep_score(acting, review.score_id(group, run), run, review.PREFERENCE, value, about)
    then = {"kind": form.get("kind", ""), "after": form.get("after", ""), "answered": group}
    return Done("Noted.", then=f"review?{urlencode({key: value for key, value in then.items() if value})}")


def thumb(acting: Acting) -> Done:
    """Keep whether a run is good."""
    value = {"up": 1.0, "down": 0.0}.get(acting.form.get("thumb", ""))
    if value is None:
        raise ConfigError("say whether the run is good: up or down")
    run = acting.key("run")
    _keep_score(acting, review.thumbs_id(run), run, "thumbs", value)
    return Done(f"Noted: thumbs {'up' if value else 'down'}.")


def correct_reviewed(acting: Acting) -> Done:
    """Keep the answer that would have been right."""
    run, message = acting.key("run"), context.assistant_message(_message(acting.answer()))
    key, comment = review.correction_id(run), _reviewed(acting)
    acting.project.keep_opinion(Correction(key, run, acting.now, "user", message, comment=comment))
    return Done("Noted: the next update may learn this answer.")


def _keep_score(acting: Acting, key: str, run: str, name: str, value: float, about: str = "") -> None:
    comment = _reviewed(acting, about)
    acting.project.keep_opinion(Score(key, run, name, value, "user", acting.now, comment=comment))


def _message(answer: str) -> Any:
    """Return a whole assistant message if the person wrote one as JSON, for an answer with tool calls; else a text."""
    try:
        message: Any = from_json(answer)
    except ValueError:
        return answer
    return message if isinstance(message, dict) and message.get("role") == "assistant" else answer


def _reviewed(acting: Acting, about: str = "") -> str:
    """Return the person's name, what was said, and the person's own words."""
    return ": ".join(part for part in (acting.who("review"), about, acting.comment()) if part)


# --- cycles and policies ---


def start_cycle(acting: Acting) -> Done:
    """Start a cycle, as a process of its own; raises `Busy` if one runs."""
    process = cycles.start_process(acting.project, acting.person)
    return Done(f"a cycle was started as process {process.pid}; this page follows it", "cycles")


def decide(acting: Acting) -> Done:
    """Do what the form says: `what`, and `policy`, `percent` or `to`; the ledger notes the reason and who it was."""
    form, project, reason = acting.form, acting.project, acting.text("reason")
    what, policy = form.get("what", ""), form.get("policy", "")
    if what not in get_args(policies.What):
        raise ConfigError(f"{what!r} is no decision; it is promote, canary, shadow, reject or rollback")
    if what == "reject" and policy and not reason:
        raise ConfigError("say why: the ledger notes it")
    percent = _percent(form.get("percent", "")) if what == "canary" and policy else None
    query = policies.DecideQuery.model_construct(what=what, policy=policy, percent=percent, to=form.get("to", ""))
    who = acting.who(what if what in ("rollback", "reject") else "promote")
    done = policies.decided(project.settings, project.store.ledger, query, who=who, reason=reason)
    return Done("; ".join(done.words), "policies" if what == "rollback" else f"policies/{policy}")


def _percent(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no share of the sessions in percent") from None


# --- all changes ---


@dataclass(frozen=True, slots=True)
class Action:
    """One change: a path below the project, and the function that makes it and returns what it did."""

    path: str
    act: Callable[[Acting], Done]
    forgets: bool = True  # whether sums over the store, as pages keep them, are wrong afterwards
    waits: bool = False  # for an engine


ACTIONS: tuple[Action, ...] = (
    Action("review/prefer", prefer, forgets=False),
    Action("review/thumb", thumb, forgets=False),
    Action("review/correct", correct_reviewed, forgets=False),
    Action("score-run/{id:any}", score, forgets=False),
    Action("correct-run/{id:any}", correct, forgets=False),
    Action("run-test/{id:any}", add_test, forgets=False),
    Action("erase-run/{id:any}", erase),
    Action("cycles/start", start_cycle),
    Action("decide", decide, waits=True),
)
