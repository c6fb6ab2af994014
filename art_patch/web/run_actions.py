"""What a person may do with a run: score it, correct an answer, make it a test of the suite, erase it.

Scores and corrections are kept as `art_patch.score()` and `art_patch.correct()` keep them. An erasure is that of
`art-patch erase`. A suite is a file of the user's, which `ART_PATCH_SUITE` names: if this server was started with it, a
test is appended to it, and otherwise the page only has the line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import Field

from art_patch import context, feedback, gate, insights
from art_patch._lib.ids import derived_id, new_id
from art_patch.errors import ConfigError, NotFound
from art_patch.trajectories import main_call
from art_patch.types import JSON, Call, Correction, Score, Trajectory
from art_patch.web.acting import Acting, Done, message_of
from art_patch.web.projects import Asked, Query
from art_patch.web.run import the_run_of, why_not_learned

SUITE = "ART_PATCH_SUITE"

# --- score and correct ---


def score(acting: Acting) -> str:
    """Keep a score; a second one of the same person and name replaces the first."""
    who, name = acting.person, " ".join(acting.form.get("name", "").split())[:100]
    if not name:
        raise ConfigError("a score needs a name, such as thumbs or reward")
    value = feedback.value_of(name, acting.form.get("value"))
    run, comment = acting.ids["id"], feedback.comment_of(acting.form.get("comment"))
    key = derived_id("web", run, name, who)
    acting.project.keep_opinion(Score(key, run, name, value, "user", acting.now, comment=comment, judge=who))
    return f"scored: {name} {value:g}"


def correct(acting: Acting) -> str:
    """Keep the right answer to a call."""
    who, text = acting.person, acting.form.get("answer", "").replace("\r\n", "\n")
    answer: Any = text
    if acting.form.get("how") == "json":
        answer = message_of(text)
        if not isinstance(answer, dict):
            raise ConfigError("the answer is an assistant message as a JSON object")
    message = context.assistant_message(answer)
    said = feedback.comment_of(acting.form.get("comment"))
    comment = f"{said} ({who})" if said else f"by {who}"
    run, call = acting.ids["id"], acting.key("call") or None
    found = acting.project.store.read.trajectories([run])
    if call is not None and call not in {each.id for its in found for each in its.calls}:
        raise NotFound("the run has no such call")
    acting.project.keep_opinion(
        Correction(new_id(), run, acting.now, "user", message, call_id=call, comment=comment),
    )
    return "the correction is kept; `art-patch export` writes it as the answer to learn"


# --- erase ---


def erasure_facts(asked: Asked) -> JSON:
    """Return what an erasure of the run would delete, and where copies of it are; nothing is deleted."""
    key = asked.ids["id"]
    report = insights.erase(asked.settings, asked.store, trajectory=key, dry_run=True)
    if not report.erasure.found:
        raise NotFound("there is no such run; it may have been erased, or pruned by the settings of retention")
    return report.facts() | {"run": key, "lines": report.lines(now=asked.now)}


def erase(acting: Acting) -> Done:
    """Erase the run, and return what was deleted and what is left to do."""
    project, key = acting.project, acting.ids["id"]
    report = insights.erase(project.settings, project.store, trajectory=key, who=acting.who("erase"))
    return Done("\n".join(report.lines(now=acting.now)), then="runs")


# --- a test of the suite ---


class SuiteQuery(Query):
    """Which call becomes a test."""

    call: str | None = Field(None, description="Id of the call; by default the last one of the longest conversation.")


def suite_facts(asked: Asked) -> JSON:
    """Return the line of a suite that asks every candidate the prompt of a call of the run."""
    run = the_run_of(asked)
    call, row = _row(run, asked.query.call)
    file = os.environ.get(SUITE)
    why_not = why_not_learned(asked.store, run)
    return {"run": run.id, "call": call.id, "row": row, "line": json.dumps(row), "file": file, "why_not": why_not}


def add_test(acting: Acting) -> str:
    """Append the prompt of a call to the suite that this server was started with."""
    file = os.environ.get(SUITE)
    if not file:
        raise ConfigError(f"this server knows no suite; start it with {SUITE}=FILE, or take the line yourself")
    found = acting.project.store.read.trajectories([acting.ids["id"]])
    if not found:
        raise NotFound("there is no such run; it may have been erased, or pruned by the settings of retention")
    if (why_not := why_not_learned(acting.project.store, found[0])) is not None:
        raise ConfigError(f"the gate may not use this run: {why_not}")
    _, row = _row(found[0], acting.key("call") or None)
    if name := " ".join(acting.form.get("name", "").split())[:200]:
        row["name"] = name
    number = gate.add_to_suite(Path(file), row)
    return f"added {row['name']} to {file}, which has {number} prompts now"


def _row(run: Trajectory, wanted: str | None) -> tuple[Call, dict[str, Any]]:
    call = main_call(run) if wanted is None else next((each for each in run.calls if each.id == wanted), None)
    if call is None:
        raise NotFound("the run has no such call" if wanted else "the run has no call, so there is nothing to ask")
    return call, gate.suite_row(call, name=f"{run.id}-{run.calls.index(call) + 1}")
