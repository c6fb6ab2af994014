"""Corrections: what people say an answer should have been, taken for the answer. Pure.

Of several corrections of a run the newest counts. Of a run that was corrected only the corrected answer is learned, at
the end of the conversation that led to it: what came after followed from the wrong answer, and other calls of the run
may have led there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from art_patch.formats.conversation import Unusable
from art_patch.trajectories import canonical, chosen_choice, main_call
from art_patch.types import JSON, Call, Choice, Correction, Trajectory


def corrected(trajectory: Trajectory, corrections: Sequence[Correction]) -> Trajectory:
    """Return the run with the answer that it should have given; unchanged if nobody corrected it.

    Raises:
        Unusable: the call that was corrected is not there.
    """
    if not corrections:
        return trajectory
    call, correction = _newest(trajectory, corrections)
    finish = "tool_calls" if correction.message.get("tool_calls") else "stop"
    answer = Choice(0, correction.message, finish)
    return replace(trajectory, calls=(replace(call, choices=(answer,), status="ok", error=None),))


def right_and_wrong(trajectory: Trajectory, corrections: Sequence[Correction]) -> tuple[Trajectory, JSON]:
    """Return the corrected run, and the answer that was given instead.

    Raises:
        Unusable: there is no such answer, or it is the same.
    """
    call, correction = _newest(trajectory, corrections)
    later = trajectory.calls[trajectory.calls.index(call) + 1 :]
    given = chosen_choice(call, later)
    if given is None:
        raise Unusable("the call that was corrected has no answer")
    if canonical(given.message) == canonical(correction.message):
        raise Unusable("the correction is what was answered")
    return corrected(trajectory, corrections), given.message


def _newest(trajectory: Trajectory, corrections: Sequence[Correction]) -> tuple[Call, Correction]:
    correction = max(corrections, key=lambda each: each.at)
    if correction.call_id is None:
        call = main_call(trajectory)
    else:
        call = next((each for each in trajectory.calls if each.id == correction.call_id), None)
    if call is None:
        raise Unusable("the call that was corrected is not there")
    return call, correction
