"""`score()`, `reward()`, `current_trajectory()`: what the app's own code knows about a run.

A mistake of the caller's (a value that is no finite number, nothing to score) raises `ConfigError` at once, patched or
not, so that it shows in the first test and not as a missing reward months later.
"""

from __future__ import annotations

import math
import time

from art_patch.context.ambient import identify
from art_patch.errors import ConfigError
from art_patch.ids import new_id
from art_patch.recording import emit
from art_patch.records import Score, TrajectoryInfo


def current_trajectory() -> TrajectoryInfo | None:
    """Return the trajectory that surrounds the running code, by `trajectory()` or by an OpenTelemetry trace.

    `None` where there is neither, even if later a conversation is stitched together.
    """
    return identify(using=False).trajectory


def score(
    name: str,
    value: float,
    *,
    trajectory_id: str | None = None,
    comment: str | None = None,
    score_id: str | None = None,
) -> None:
    """Judge a run.

    Args:
        name: what is judged, such as `thumbs`; scores of different names stand side by side.
        value: a finite number.
        trajectory_id: the run, for scores that come later or from elsewhere; the current one unless given.
        comment: the user's words.
        score_id: giving the same id again replaces the score.

    Raises:
        ConfigError: if the value is not a finite number, or there is no trajectory to score.
    """
    if not name:
        raise ConfigError("a score needs a name, such as 'thumbs'")
    if not isinstance(value, int | float) or not math.isfinite(value):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"score {name!r} must be a finite number, not {value!r}")
    info = None if trajectory_id is not None else identify().trajectory
    if trajectory_id is None and info is None:
        raise ConfigError(
            f"there is no trajectory to give the score {name!r} to; call it inside art_patch.trajectory(), "
            "or pass trajectory_id="
        )
    if info is not None:
        emit(info)  # the first thing recorded of a run may be its score
    target = trajectory_id or (info.id if info is not None else "")
    emit(Score(score_id or new_id(), target, name, float(value), "user", time.time(), comment=comment))


def reward(value: float, *, comment: str | None = None) -> None:
    """Judge the current run: `score("reward", value)`.

    Raises:
        ConfigError: as `score` does.
    """
    score("reward", value, comment=comment)
