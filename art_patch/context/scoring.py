"""`score()`, `reward()`, `correct()` and `current_trajectory()`: the app's own code scores and corrects its runs.

A mistake of the caller (a value that is not finite, an empty answer, no run to score) raises `ConfigError` at once,
with or without `patch()`, so that the app's first test shows it and not a missing reward months later.
"""

import json
import math
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, cast

from art_patch._lib.faults import faults
from art_patch._lib.ids import new_id
from art_patch.context.ambient import identify, surroundings
from art_patch.errors import ConfigError
from art_patch.recording import emit, knows
from art_patch.types import Correction, Score, TrajectoryInfo


def score(
    name: str,
    value: float,
    *,
    trajectory_id: str | None = None,
    comment: str | None = None,
    score_id: str | None = None,
    project: str | None = None,
) -> None:
    """Score a run of the agent.

    Args:
        name: name of the score, such as `thumbs`. Scores of different names are stored side by side.
        value: the score; it must be finite.
        trajectory_id: id of the run, for a score that is given after the run or in another process. Without it, the
            current run is scored.
        comment: the text that a user wrote beside the score.
        score_id: an id of your own; a second score with the same id replaces the first.
        project: the project to write the score to, if this process has several and has made no call of the run.
            Without it, the score is written to each project in which the run has calls.

    Raises:
        ConfigError: if the value is not finite, there is no trajectory to score, or the process has no such project.
    """
    if not name:
        raise ConfigError("a score needs a name, such as 'thumbs'")
    # `True` and `False` are numbers, too: 1 and 0.
    if not isinstance(value, int | float) or not math.isfinite(value):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"score {name!r} must be a finite number, not {value!r}")
    target, info = _target(f"give the score {name!r} to", trajectory_id)
    key = score_id or new_id()
    _store(Score(key, target, name, float(value), "user", time.time(), comment=comment), info, project)


def reward(value: float, *, comment: str | None = None) -> None:
    """Score the current run under the name `reward`: short for `score("reward", value)`, with the same errors."""
    score("reward", value, comment=comment)


def correct(
    answer: str | Mapping[str, Any],
    *,
    trajectory_id: str | None = None,
    call_id: str | None = None,
    comment: str | None = None,
    correction_id: str | None = None,
    project: str | None = None,
) -> None:
    """Store the right answer for a call that the model answered wrongly.

    `art-patch export` writes the correction as the answer to learn (formats chat and sft), and as the better answer of
    a pair (format preference).

    Args:
        answer: the right answer: a text, or an assistant message as OpenAI JSON (`content`, `tool_calls`).
        trajectory_id: id of the run, for a correction that is given after the run or in another process. Without it,
            the current run is corrected.
        call_id: the call that was answered wrongly. Without it, the final call of the run's conversation.
        comment: the text that a user wrote beside the correction.
        correction_id: an id of your own; a second correction with the same id replaces the first.
        project: as in `score()`. Without it, the correction is written to the project of the run's latest call.

    Raises:
        ConfigError: if the answer is empty or no assistant message, there is no trajectory to correct, or the process
            has no such project.
    """
    message = assistant_message(answer)
    target, info = _target("correct", trajectory_id)
    key = correction_id or new_id()
    _store(Correction(key, target, time.time(), "user", message, call_id=call_id, comment=comment), info, project)


def _target(what: str, trajectory_id: str | None) -> tuple[str, TrajectoryInfo | None]:
    """Return the id of the run that is meant, and the run if it is the current one."""
    if trajectory_id is not None:
        return trajectory_id, None
    info = identify().trajectory
    if info is None:
        raise ConfigError(
            f"there is no trajectory to {what}; call it inside art_patch.trajectory(), or pass trajectory_id="
        )
    return info.id, info


def _store(record: Score | Correction, info: TrajectoryInfo | None, project: str | None) -> None:
    known, run = knows(record.trajectory_id, project), surroundings().open
    if not known and run is not None and run.info is info:
        run.waiting.append(record)  # until a call of the run, or its end, shows to which project it belongs
    # The current run is announced, because its first record may be this one.
    elif not emit(*(() if info is None else (info,)), record, project=project) and not known and info is None:
        faults.trouble("context.no_project", LookupError("no project of this process made the run; pass project="))


def assistant_message(answer: Any) -> dict[str, Any]:
    """Return the right answer of a correction as OpenAI JSON, a copy that the app cannot change any more."""
    if isinstance(answer, str):
        answer = {"content": answer}
    if not isinstance(answer, Mapping):
        raise ConfigError(
            f"a correction is a text or an assistant message as a dict, not {type(answer).__name__}; "
            "of an object of the OpenAI SDK give message.model_dump()"
        )
    given = {key: value for key, value in cast("Mapping[str, Any]", answer).items() if value is not None}
    if given.setdefault("role", "assistant") != "assistant":
        raise ConfigError(f"a correction is an assistant's message, not one of {given['role']!r}")
    content = given.get("content", "")
    if not isinstance(content, str | list):
        raise ConfigError(f"the content of a correction is a text or a list of parts, not {type(content).__name__}")
    calls = given.pop("tool_calls", ())
    if not isinstance(calls, list | tuple):
        raise ConfigError(f"the tool_calls of a correction are a list, not {type(calls).__name__}")
    if not (content.strip() if isinstance(content, str) else content) and not calls:
        raise ConfigError("a correction says what the right answer is: give it a text, or tool_calls")
    if calls:
        each = enumerate(cast("list[Any]", calls), 1)
        given["tool_calls"] = [_tool_call(call, number) for number, call in each]
    try:
        # The way through JSON makes a deep copy, and refuses what the store could not keep.
        return json.loads(json.dumps({"role": "assistant", **given}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a correction must be JSON ({error}); give texts, numbers, lists and dicts") from None


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    function: Any = cast("Mapping[str, Any]", call).get("function") if isinstance(call, Mapping) else None
    name: Any = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"tool call {number} of a correction must be {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    arguments = function.get("arguments", "{}")
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        readable = isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        text, readable = "", False
    if not readable:
        raise ConfigError(f"the arguments of {name!r} in a correction must be an object, or its JSON as a text")
    # The app knows the right call, but rarely an id for it. Trainers only need ids that differ.
    key = call.get("id") or f"call_{number}"
    return {"id": key, "type": "function", "function": {"name": name, "arguments": text}}


# The trajectory that `capture_auto_trajectory` around the running code is making; its class is in `rollouts`.
CAPTURED: ContextVar[Any] = ContextVar("art_patch_captured", default=None)


def current_trajectory() -> TrajectoryInfo | Any | None:
    """Return the trajectory that surrounds the code, from `trajectory()` or an OpenTelemetry trace; `None` without one.

    Inside `capture_auto_trajectory` it is the `Trajectory` that is being captured; set its `reward` to score it.
    """
    return CAPTURED.get() or identify(using=False).trajectory
