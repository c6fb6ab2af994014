"""Chooses the turns of runs without siblings that the champion answers again, and makes groups of the answers. Pure.

Siblings are needed, because an advantage needs a comparison, and in production each task occurs once. So the champion
answers a recorded turn a few more times, from its exact prompt. No tool runs, because the prompt already contains the
tools' results. The new answers and the recorded answer form a group about this turn alone. The judge also sees what
followed in the recorded run. The recorded answer joins the group as a copy. If a policy of art_patch gave it, it is
trained on like the new answers. If upstream gave it, it is ranked with them but never trained on.

The other way to siblings runs the app's own function again; see `replays`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from art_patch._lib.option import Option
from art_patch.trajectories import chosen_choice, followed
from art_patch.types import Call, Choice, Group, Trajectory, TrajectoryInfo

# Reasons of `trajectories.why_untrainable` that speak of the answer alone: the whole prompt is known.
_NO_REASON_AGAINST = {
    None,
    "answered by upstream",
    "greedy sampling has no exploration",
    *(f"{name} cuts the distribution" for name in ("top_p", "top_k", "min_p")),
    *(f"{name}_penalty shifts the distribution" for name in ("presence", "frequency", "repetition")),
    *(f"{what} are missing" for what in ("token ids", "log-probabilities", "prompt token ids")),
}


def can_be_learned_from(run: Trajectory) -> bool:
    """Whether one of a run's answers can be trained on."""
    return any(call.untrainable is None for call in run.calls)


def can_be_asked_again(call: Call) -> bool:
    """Whether a policy can answer the call's prompt again, for a comparison with the recorded answer."""
    return call.api != "completions" and bool(call.choices) and call.untrainable in _NO_REASON_AGAINST


Pick = Literal["spread", "last", "fault"]

# Words in the first 200 characters of a tool's result that hint at a wrong call.
_TROUBLE = ("error", "exception", "traceback", "not found", "no such", "invalid", "failed", "denied", "bad call")


@dataclass(frozen=True, slots=True)
class ResampleConfig:
    """Settings of the step in which the champion answers recorded turns again, to make siblings."""

    samples: Annotated[
        int,
        Option(name="resample", least=0, env=True, help="New answers to a turn of a run without siblings; 0 for none."),
    ] = 7
    turns: Annotated[
        int, Option(name="resample-turns", least=1, env=True, help="Turns of each such run that are answered again.")
    ] = 1
    # `spread`: turns of all depths in rotation. `last`: the last turns. `fault`: the turn that a correction names, else
    # the turn before a tool's result that looks like an error, else the last.
    pick: Annotated[Pick, Option(name="resample-pick", env=True, help="Which turns of the run.")] = "spread"
    max_turns: Annotated[
        int, Option(name="resample-max", least=0, env=True, help="Largest number of such turns in this cycle.")
    ] = 200
    # Runs of a task that recurs slowly would else be used up one by one, and never be compared as a whole.
    wait_cycles: Annotated[
        int,
        Option(
            name="resample-wait", least=0, most=50, env=True,
            help="Cycles that runs of a task wait for more siblings first, if it has two or more.",
        ),
    ] = 3  # fmt: skip
    per_minute: Annotated[
        float | None, Option(name="resample-per-minute", least=0.01, env=True, help="Largest number of turns a minute.")
    ] = None
    window: Annotated[
        str | None, Option(name="resample-window", env=True, help="Local time of day to do it in, such as 22:00-06:00.")
    ] = None
    temperature: float = 1.0  # where the app's own was 0 or is unknown, and so would not explore
    concurrency: int = 4  # turns that are asked at once
    priority: int = 100  # vLLM's: a larger number waits for a smaller; the app's own calls have 0


@dataclass(frozen=True, slots=True)
class ResampleTurn:
    """A recorded turn that the champion answers again: one call of a run, with the run and its scenario."""

    trajectory: Trajectory
    call: Call
    scenario_key: str

    @property
    def answer(self) -> Choice | None:
        """The recorded answer with which the app continued; a call may have several answers. `None` if it has none."""
        calls = self.trajectory.calls
        return chosen_choice(self.call, calls[calls.index(self.call) + 1 :])


def choose_turns(
    trajectories: Sequence[Trajectory],
    config: ResampleConfig,
    *,
    keys: Mapping[str, str],
    corrected: Mapping[str, str] | None = None,
    waited: Mapping[str, int] | None = None,
) -> tuple[tuple[ResampleTurn, ...], dict[str, int]]:
    """Choose the turns to answer again, up to `max_turns`: first one turn of every run, then a second of every run.

    Also return reason -> number of runs of which no turn was chosen.

    Args:
        trajectories: runs without siblings, most important first.
        keys: trajectory id -> scenario key.
        corrected: trajectory id -> id of the call that a person corrected.
        waited: scenario key -> number of earlier cycles in which its oldest run waited for siblings.
    """
    left: Counter[str] = Counter()
    siblings = Counter(keys[trajectory.id] for trajectory in trajectories if can_be_learned_from(trajectory))
    ranked: list[list[ResampleTurn]] = []
    for trajectory in trajectories:
        key = keys[trajectory.id]
        if siblings[key] >= 2 and (more := config.wait_cycles - (waited or {}).get(key, 0)) > 0:
            left[f"waits up to {more} more cycle{'s' * (more > 1)} for siblings"] += 1
            continue
        calls = [call for call in trajectory.calls if can_be_asked_again(call)]
        if not calls:
            left["no turn can be answered again"] += 1
            continue
        first = first_choice(trajectory, calls, config.pick, (corrected or {}).get(trajectory.id))
        ordered = calls[first:] + calls[:first] if config.pick == "spread" else [calls[first], *reversed(calls[:first])]
        ranked.append([ResampleTurn(trajectory, call, key) for call in ordered[: config.turns]])
    by_rank = [turns[rank] for rank in range(config.turns) for turns in ranked if rank < len(turns)]
    chosen = by_rank[: config.max_turns]
    asked = {turn.trajectory.id for turn in chosen}
    if spared := sum(turns[0].trajectory.id not in asked for turns in ranked):
        left["beyond the budget of this cycle"] += spared
    return tuple(chosen), dict(left)


def turn_group(
    turn: ResampleTurn, alternatives: Sequence[Call], *, new_id: Callable[[], str], at: float
) -> Group | None:
    """Return the group of a turn's recorded answer and its new answers, from time `at`; `None` if all are the same."""
    answer = turn.answer
    given = [] if answer is None else [replace(turn.call, choices=(answer,), status="ok")]
    siblings = tuple(_sibling(turn, call, new_id, at) for call in (*given, *alternatives))
    if len({_answer(sibling) for sibling in siblings}) < 2:
        return None
    return Group(new_id(), turn.scenario_key, "resampled", siblings, followed=followed(turn.trajectory, turn.call))


def _sibling(turn: ResampleTurn, call: Call, new_id: Callable[[], str], at: float) -> Trajectory:
    source, key = turn.trajectory.info, new_id()
    same = {name: getattr(source, name) for name in ("name", "scenario_key", "session_id", "user_id")}
    info = TrajectoryInfo(key, at, "resampled", **same)
    return Trajectory(info, (replace(call, id=new_id(), trajectory_id=key, span_id=None, shadow_of=turn.call.id),))


def _answer(sibling: Trajectory) -> str:
    message = sibling.calls[0].choices[0].message
    calls: Any = message.get("tool_calls") or ()
    return repr((message.get("content") or "", [call.get("function") for call in calls]))


def first_choice(trajectory: Trajectory, calls: Sequence[Call], pick: Pick, corrected: str | None) -> int:
    """Return the index of the call that is answered again first; `corrected` is the id of one that a person corrected.

    `calls` are those of the run that can be asked again, at least one.
    """
    if pick == "spread":
        # By a hash of the run's id: over many runs all depths are chosen, and a second call chooses the same.
        return int.from_bytes(hashlib.blake2b(trajectory.id.encode(), digest_size=4).digest()) % len(calls)
    if pick == "fault":
        for index, call in enumerate(calls):
            if call.id == corrected or _went_wrong(trajectory, call):
                return index
    return len(calls) - 1


def _went_wrong(trajectory: Trajectory, call: Call) -> bool:
    """Whether a tool's result right after the answer looks like an error."""
    for message in followed(trajectory, call):
        if message.get("role") != "tool":
            return False
        if any(word in str(message.get("content"))[:200].casefold() for word in _TROUBLE):
            return True
    return False
