"""Chooses what gives runs without siblings some: turns that are answered again, and runs that are repeated. Pure.

Siblings are needed, because an advantage needs a comparison, and in production each task occurs once.

**Turns** (`choose_turns`). The champion answers a recorded turn a few more times, from its exact prompt. No tool runs,
because the prompt already contains the tools' results. The new answers and the recorded answer form a group about this
turn alone. The judge also sees what followed in the recorded run. The recorded answer joins the group as a copy. If a
policy of art_patch gave it, it is trained on like the new answers. If upstream gave it, it is ranked with them but
never trained on.

**Repetitions** (`choose_replays`). The app's own function is called again with the same arguments, tools included. So
only runs are repeated whose function the app marked as `replayable`, and each of them only a few times in all. Held-out
runs get no siblings; instead, both policies repeat them in each gate run (`choose_comparisons`).

A repetition may begin at a turn of the run: the calls before it get the answers that were recorded, so the run comes to
this turn with the same prompt, and a policy answers it and all that follow. What the repetitions achieve on average is
what the state at this turn is worth, so the comparison gives credit to this turn and those after it alone. This is the
Monte Carlo estimate of VinePPO (https://arxiv.org/abs/2410.01679), with the recorded run as one of the samples.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from art_patch._lib.option import Option
from art_patch.trajectories import chosen_choice, followed
from art_patch.types import COPIES, REPLAY, REPLAY_FROM, REPLAY_OF, Call, Choice, Group, Trajectory, TrajectoryInfo

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


# Tag of a repeated run. Its metadata names the original in `replay_of`, and a repeated run is never repeated itself.
REPLAYED = "replayed"

Begin = Literal["start", Pick]


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Settings for repeating recorded runs by calling the app's own function again."""

    # Repetitions of a run whose task has no other runs, at most 15; other runs of the task are subtracted. A run that
    # cannot be trained on is repeated once more.
    samples: int = 3
    max_runs: Annotated[  # of one cycle; the gate has a second budget of this size
        int,
        Option(name="replay-max", least=1, env=True, help="Largest number of replays in this cycle, and in its gate."),
    ] = 100
    # `start`: the whole run. Else at a turn of the run, which is picked as by `resample-pick`: then each run without
    # siblings gets `samples` siblings of its own, which differ from it from this turn on.
    begin: Annotated[
        Begin, Option(name="replay-from", env=True, help="Where a replay begins: at the start of the run, or a turn.")
    ] = "start"
    timeout_s: Annotated[  # also for the import of its module
        float, Option(name="replay-timeout-s", least=1.0, env=True, help="Seconds that one replay may take.")
    ] = 300.0
    concurrency: int = 2  # processes at once
    python: Annotated[
        str | None, Option(name="replay-python", env=True, help="Python interpreter of your app. Default: this one.")
    ] = None
    # Settings by name (`project`, `home`, `store`) that the app's processes get beside the job's environment. Not in
    # the repr, because a store's URL may hold a password.
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


@dataclass(frozen=True, slots=True)
class Replay:
    """One planned repetition of a recorded run, with the function to call and its arguments."""

    original: Trajectory
    number: int  # which repetition in the run's life it is, from 1; 0 for a comparison of two policies
    target: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    redacted: bool = False  # the recorded run was redacted, so the repetition must be, too
    # The call at which the repetition begins. Those before it get the answers that were recorded. `None`: the first.
    turn: Call | None = None

    @property
    def before(self) -> tuple[Call, ...]:
        """The recorded calls before the turn, whose answers are given again."""
        calls = self.original.calls
        return () if self.turn is None else calls[: calls.index(self.turn)]


def choose_replays(
    lonely: Sequence[Trajectory],
    config: ReplayConfig,
    *,
    keys: Mapping[str, str],
    was_made: Callable[[str, int], bool],
    corrected: Mapping[str, str] | None = None,
) -> tuple[tuple[Replay, ...], dict[str, int]]:
    """Choose the runs to repeat, tasks with the oldest runs first; also return reason -> number of runs left out.

    Args:
        lonely: runs without siblings, oldest first. None is held out: `form_groups(singles=True)` groups those.
        keys: trajectory id -> scenario key.
        was_made: returns whether an earlier cycle made this repetition, given the run's id and the repetition's number.
        corrected: trajectory id -> id of the call that a person corrected.
    """
    # Runs that begin at a turn of one run are siblings of that run alone, not of the other runs of its task.
    tasks: dict[str, list[Trajectory]] = defaultdict(list)
    for run in lonely:
        tasks[keys[run.id] if config.begin == "start" else run.id].append(run)
    left: Counter[str] = Counter()
    chosen: list[Replay] = []
    for runs in tasks.values():
        offers: dict[str, Replay] = {}
        for run in runs:
            one, why_not = _offered(run, config.begin, (corrected or {}).get(run.id))
            if one is None:
                left[why_not] += 1
            else:
                offers[run.id] = one
        missing = config.samples + 1 - sum(map(can_be_learned_from, runs))
        # Number before run: each of the runs once, then each of them a second time.
        possible = [
            replace(one, number=number)
            for number in range(1, config.samples + 2)
            for run in runs
            if (one := offers.get(run.id)) is not None
            if number <= config.samples or not can_be_learned_from(run)
            if not was_made(run.id, number)
        ]
        its = possible[: max(missing, 0)]
        if len(chosen) + len(its) > config.max_runs:  # part of a task would make no group
            left["beyond the budget of this cycle"] += len(offers)
        elif its:
            chosen += its
        else:
            left["run again already"] += len(offers)
    return tuple(chosen), dict(+left)


def _offered(run: Trajectory, begin: Begin, corrected: str | None) -> tuple[Replay | None, str]:
    """Return how to repeat a run, or `None` and the reason why it cannot be repeated."""
    if (offer := offer_of(run)) is None:
        return None, "no function to run again"
    one = _replay(run, 0, offer)
    if begin == "start":
        return one, ""
    if one.redacted:  # the app would be given redacted answers, which it never got
        return None, "it was redacted, so it cannot begin at a turn"
    calls = [call for call in run.calls if can_be_asked_again(call)]
    if not calls:
        return None, "no turn can be answered again"
    return replace(one, turn=calls[first_choice(run, calls, begin, corrected)]), ""


def branch_group(
    original: Trajectory, repeated: Sequence[Trajectory], *, scenario_key: str, new_id: Callable[[], str]
) -> Group | None:
    """Return the group of runs that began at a turn of `original`, and of a copy of what followed the turn there.

    `None` if no run came to the turn with the prompt that was recorded. The first sibling is the copy, with the scores
    that the original got from users and code; the caller must store it.
    """
    # Of cycles that were killed, with other settings, there may be repetitions from the start or from another turn. In
    # those, calls before this turn were sampled, too, which the comparison says nothing about.
    begun = {
        call.id: tuple(run for run in repeated if run.info.metadata.get(REPLAY_FROM) == call.id and _passed(run, call))
        for call in original.calls
    }
    at = max(original.calls, key=lambda call: len(begun[call.id]))
    if not begun[at.id]:
        return None
    key, source = new_id(), original.info
    metadata = {name: value for name, value in source.metadata.items() if name != REPLAY}
    info = replace(source, id=key, origin="branch", metadata=metadata)
    after = original.calls[original.calls.index(at) :]
    calls = (replace(each, id=new_id(), trajectory_id=key, span_id=None, shadow_of=each.id) for each in after)
    own = (score for score in original.scores if score.group_id is None)
    scores = (replace(score, id=new_id(), trajectory_id=key) for score in own)
    copy = Trajectory(info, tuple(calls), tuple(scores))
    return Group(new_id(), scenario_key, "branched", (copy, *begun[at.id]))


def _passed(run: Trajectory, turn: Call) -> bool:
    """Whether a run came to the turn: one of its calls has the turn's prompt, to the token where the ids are known."""
    for call in run.calls:
        if (call.messages, call.tools) == (turn.messages, turn.tools):
            ids = (call.prompt_token_ids, turn.prompt_token_ids)
            return None in ids or ids[0] == ids[1]
    return False


def choose_comparisons(
    runs: Mapping[str, Sequence[TrajectoryInfo]], config: ReplayConfig, *, samples: int
) -> tuple[dict[str, Replay], dict[str, int]]:
    """Choose one run of each scenario for both policies to repeat; also return reason -> number of scenarios left out.

    `runs` has the runs of each scenario key, best first. Each policy repeats each chosen run `samples` times;
    `config.max_runs` limits the repetitions of both policies together.
    """
    left: Counter[str] = Counter()
    chosen: dict[str, Replay] = {}
    for key, its in runs.items():
        own = (Trajectory(info, ()) for info in its if info.origin not in COPIES)
        found = next(((run, offer) for run in own if (offer := offer_of(run)) is not None), None)
        if found is None:
            left["no function to run again"] += 1
        elif 2 * samples * (len(chosen) + 1) > config.max_runs:
            left["beyond the budget of this cycle"] += 1
        else:
            chosen[key] = _replay(found[0], 0, found[1])
    return chosen, dict(left)


def _replay(run: Trajectory, number: int, offer: Mapping[str, Any]) -> Replay:
    return Replay(run, number, offer["target"], offer["args"], offer["kwargs"], bool(offer.get("redacted")))


def offer_of(run: Trajectory) -> Mapping[str, Any] | None:
    """Return the function and arguments that the app recorded for repeating a run; `None` if it cannot be repeated."""
    offer: Any = run.info.metadata.get(REPLAY)
    if not isinstance(offer, Mapping) or REPLAY_OF in run.info.metadata:
        return None
    if run.info.origin == "imported":  # an importer of an earlier release kept what the file said
        return None
    kinds = {"target": str, "args": list, "kwargs": dict}
    return offer if all(isinstance(offer.get(name), kind) for name, kind in kinds.items()) else None
