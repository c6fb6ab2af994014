"""Chooses what both policies answer in the gate: turns of held-out traffic, and a suite of prompts.

The turns come from users, so a user could try to choose prompts that steer a promotion. Two rules prevent this:
turns of users who arrived lately are not used, and the scenarios of one user are at most a share of all.

A **suite** is a file of prompts that every candidate answers, whatever prompts the traffic contains. It has one prompt
on each line, as JSON::

    {"messages": [{"role": "user", "content": "Where is order 7?"}], "tools": [...], "name": "order", "max_tokens": 64}

Only `messages` is required. If the last message is the assistant's answer, as in OpenAI's fine-tuning files, it is left
out. The default of `name` is the line's number. `temperature`, `max_tokens`, `max_completion_tokens`, `stop` and
`chat_template_kwargs` are sent to the engine. The judge and the user's checks score the answers like those on held-out
traffic.
"""

import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from art_patch.errors import ConfigError
from art_patch.trajectories import canonical
from art_patch.types import Call, Choice, Group, Trajectory, TrajectoryInfo

# Prefix of a suite's scenario keys; scenario keys of traffic never begin so.
PREFIX = "suite:"

# Values of `Call.untrainable` that speak of the answer alone: the whole prompt is known, so it can be asked again.
_ASKABLE = (None, "answered by upstream", "greedy sampling has no exploration")
# With fewer known users, a limit for each of them would leave nothing to ask.
_MIN_USERS = 4

_PARAMS = ("temperature", "max_tokens", "max_completion_tokens", "stop", "chat_template_kwargs")
_KNOWN = {"messages", "tools", "name", *_PARAMS}


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt that candidate and champion both answer, as a call of a held-out scenario, or made from the suite."""

    scenario_key: str
    call: Call
    # The run that the call is from. User checks see it; the judge does not.
    info: TrajectoryInfo | None = None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out turns that both policies answer, and the reasons why held-out scenarios were left out."""

    turns: tuple[Turn, ...]
    # Reason -> number of scenarios that are not asked.
    left: Mapping[str, int]
    # Scenario key -> the runs that its turns may come from, all of one user, newest first.
    runs: Mapping[str, tuple[TrajectoryInfo, ...]] = field(default_factory=dict[str, tuple[TrajectoryInfo, ...]])
    groups: Mapping[str, str] = field(default_factory=dict[str, str])  # scenario key -> id of its newest group

    @property
    def user_of(self) -> dict[str, str | None]:
        """Scenario key -> its user, or `None`."""
        return {turn.scenario_key: turn.info and turn.info.user_id for turn in self.turns}


@dataclass(frozen=True, slots=True)
class Given:
    """The answers of one policy to a turn, and the time that the policy took for them."""

    choices: tuple[Choice, ...]
    duration_ms: float | None  # `None` for a recorded answer, which was given at another time to one request alone


@dataclass(frozen=True, slots=True)
class Answered:
    """A turn of the gate, and both policies' answers to its prompt."""

    turn: Turn
    candidate: Given
    champion: Given


# --- held-out traffic ---


def new_users(
    first_seen: Mapping[str, float], *, project_since: float, new_user_s: float, now: float
) -> frozenset[str]:
    """Return the users who arrived within the last `new_user_s` seconds; the gate does not use their prompts.

    `first_seen` has the time of each user's first call, `project_since` that of the project's first call, both in
    seconds since the epoch. Users who arrived within the first `new_user_s` seconds of the project are never new,
    because otherwise a young project would have no prompts for the gate.
    """
    since = max(now - new_user_s, project_since + new_user_s)
    return frozenset(user for user, at in first_seen.items() if at > since)


def held_out_turns(
    groups: Sequence[Group], *, scenarios: int, turns_per_scenario: int, seed: int,
    without: frozenset[str] = frozenset(), max_user_share: float = 1.0,
) -> HeldOut:  # fmt: skip
    """Choose turns of held-out groups for the gate: newest scenarios first, and turns of different depths first.

    `groups` come oldest first; runs of the users in `without` are not used. All turns of a scenario are of one user,
    the one with the fewest scenarios so far, because users are the units of the test. A user has at most
    `max_user_share` of the scenarios; that applies if at least four users are known, and is never less than twice an
    equal share. `seed` chooses between calls of the same depth (number of messages).
    """
    calls: dict[str, list[tuple[TrajectoryInfo, Call]]] = defaultdict(list)
    runs: dict[str, list[TrajectoryInfo]] = defaultdict(list)
    silenced: set[str] = set()
    for group in reversed(groups):
        for run in group.trajectories:
            if run.info.user_id in without:
                silenced.add(group.scenario_key)
                continue
            askable = [(run.info, c) for c in run.calls if c.untrainable in _ASKABLE and c.choices]
            if askable:
                calls[group.scenario_key] += askable
                runs[group.scenario_key].append(run.info)
    owner_of = _owners({key: [info.user_id for info, _ in theirs] for key, theirs in calls.items()})
    for key, owner in owner_of.items():
        calls[key] = [(info, call) for info, call in calls[key] if info.user_id == owner]
        runs[key] = [info for info in runs[key] if info.user_id == owner]
    keys, surplus = _within_share(owner_of, scenarios, max_user_share)
    silent = len(silenced - calls.keys())
    left = {"of users who just arrived": silent, "a user's scenarios are more than their share": surplus}
    rng = random.Random(seed)
    turns = tuple(turn for key in keys for turn in _spread(key, calls[key], turns_per_scenario, rng))
    newest = {key: tuple(sorted(runs[key], key=lambda run: run.started_at, reverse=True)) for key in keys}
    last = {group.scenario_key: group.id for group in groups}  # they come oldest first
    group_of = {key: last[key] for key in keys}
    return HeldOut(turns, {reason: count for reason, count in left.items() if count}, newest, group_of)


def _owners(users_of: Mapping[str, Sequence[str | None]]) -> dict[str, str | None]:
    """Return for each scenario the one user whose runs speak for it; `None` if no user is known."""
    count_of, owner_of = Counter[str](), dict[str, str | None]()
    for key, users in users_of.items():
        known = [user for user in users if user is not None]
        owner = owner_of[key] = min(known, key=count_of.__getitem__, default=None)
        if owner is not None:
            count_of[owner] += 1
    return owner_of


def _within_share(owner_of: Mapping[str, str | None], limit: int, max_share: float) -> tuple[list[str], int]:
    """Return the newest scenarios that keep every user's share, and how many scenarios were passed over for it."""
    waiting, users = list(owner_of), {owner for owner in owner_of.values() if owner is not None}
    share = max(max_share, 2 / max(1, len(users)))
    while len(users) >= _MIN_USERS:
        taken = waiting[:limit]
        count_of = Counter(owner for key in taken if (owner := owner_of[key]) is not None)
        user, count = max(sorted(count_of.items()), key=lambda item: item[1], default=("", 0))
        # One scenario of each user always passes, however small the share is.
        if count <= max(1.0, share * len(taken)):
            break
        # The user's oldest scenario goes, an older one of somebody else's comes, and all shares are counted anew.
        waiting.remove(next(key for key in reversed(taken) if owner_of[key] == user))
    return waiting[:limit], len(owner_of) - len(waiting)


def _spread(key: str, theirs: Sequence[tuple[TrajectoryInfo, Call]], limit: int, rng: random.Random) -> list[Turn]:
    """Choose turns of a scenario: one of each depth, then a second of each, and so on; each prompt at most once."""
    by_depth: dict[int, dict[Any, Turn]] = defaultdict(dict)
    for info, call in theirs:
        prompt = call.prompt_token_ids or tuple(map(canonical, call.messages))
        by_depth[len(call.messages)].setdefault(prompt, Turn(key, call, info))
    depths = [rng.sample(list(same.values()), len(same)) for _, same in sorted(by_depth.items())]
    deepest = max(map(len, depths), default=0)
    return [same[rank] for rank in range(deepest) for same in depths if rank < len(same)][:limit]


# --- what the judge ranks ---

# (turn, both policies' answers to it as one group, ids of the candidate's answers in that group).
BlindComparison = tuple[Turn, Group, frozenset[str]]


def blind_answers(
    turn: Turn, candidate: Sequence[Choice], champion: Sequence[Choice], *, new_id: Callable[[], str],
    exact: bool = False,
) -> tuple[Group, frozenset[str]]:  # fmt: skip
    """Return both policies' answers as one group that names no policy, and the ids of the candidate's answers in it.

    `exact` keeps tokens and log-probabilities, which only a teacher reads.
    """

    def run(choice: Choice) -> Trajectory:
        key = new_id()
        call = replace(turn.call, id=new_id(), trajectory_id=key, choices=(replace(choice, index=0),))
        return Trajectory(TrajectoryInfo(key, 0.0), (_blind_call(call, exact),))

    ours, theirs = tuple(map(run, candidate)), tuple(map(run, champion))
    group = Group(new_id(), turn.scenario_key, "gate", ours + theirs, held_out=True)
    return group, frozenset(one.id for one in ours)


def _blind_call(call: Call, exact: bool = False) -> Call:
    """Return a copy of the call with only its prompt, tools and answers: no policy or time, and if `exact` tokens."""
    choices = tuple(Choice(choice.index, choice.message, choice.finish_reason) for choice in call.choices)
    blind = Call(call.id, call.trajectory_id, 0.0, call.requested_model, call.messages, choices, call.tools)
    if not exact:
        return blind
    return replace(blind, choices=call.choices, params=call.params, prompt_token_ids=call.prompt_token_ids)


def data_hash(turns: Sequence[Turn]) -> str:
    """Return a sha256 of the scenarios, prompts and tools of all turns; the order of the turns does not matter."""

    def digest(turn: Turn) -> bytes:
        key = turn.scenario_key.encode("utf-8", "surrogatepass")
        # The word stands between, so that a tool can never be mistaken for a message.
        asked = (*map(canonical, turn.call.messages), b"\0tools", *map(canonical, turn.call.tools))
        return hashlib.sha256(b"\0".join((key, *asked))).digest()

    return hashlib.sha256(b"".join(sorted(map(digest, turns)))).hexdigest()


# --- whole runs ---


@dataclass(frozen=True, slots=True)
class Repeated:
    """A scenario whose recorded run both policies repeated, each of them equally often."""

    # A turn of the recorded run: it says whose run it was and what was asked.
    turn: Turn
    candidate: tuple[Trajectory, ...]
    champion: tuple[Trajectory, ...]

    @property
    def runs(self) -> tuple[Trajectory, ...]:
        """The candidate's runs of this scenario, followed by the champion's."""
        return (*self.candidate, *self.champion)


def speaks_of(run: Trajectory, policy: str) -> bool:
    """Whether this policy answered the run's calls: no other policy did, and none fell back to upstream."""
    answered = any(call.policy == policy and call.choices for call in run.calls)
    # Calls without a policy (tools of the provider's) go upstream whoever serves, so they count for neither.
    return answered and all(call.policy in (policy, None) and call.fallback is None for call in run.calls)


def blind_runs(repeated: Repeated, *, new_id: Callable[[], str], exact: bool = False) -> BlindComparison:
    """Return the turn, both policies' runs as one group without policy names, and the ids of the candidate's runs."""
    siblings = tuple(
        Trajectory(TrajectoryInfo(run.id, 0.0), tuple(_blind_call(call, exact) for call in run.calls))
        for run in repeated.runs
    )
    group = Group(new_id(), repeated.turn.scenario_key, "gate", siblings, held_out=True)
    return repeated.turn, group, frozenset(run.id for run in repeated.candidate)


def answered_in(repeated: Repeated) -> Answered:
    """Return all answers in both policies' runs as if they answered one turn, for the checks of `collapse`."""
    # The turn offers the tools of all calls: a call of a tool that only a later turn offers is no format error.
    tools = {canonical(tool): tool for run in repeated.runs for call in run.calls for tool in call.tools}
    turn = replace(repeated.turn, call=replace(repeated.turn.call, tools=tuple(tools.values())))
    return Answered(turn, _given(repeated.candidate), _given(repeated.champion))


def _given(runs: Sequence[Trajectory]) -> Given:
    """Return a policy's answers in its runs, and the mean time that it took to answer in one run."""
    theirs = [call for run in runs for call in run.calls if call.policy is not None]
    choices = tuple(choice for call in theirs for choice in call.choices)
    return Given(choices, sum(call.duration_ms for call in theirs) / len(runs))


# --- the suite ---


def read_suite(path: Path) -> tuple[Turn, ...]:
    """Return a suite file's prompts as turns; `ConfigError` if it is unreadable, empty, malformed or repeats a name."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the suite {path} cannot be read ({error}); give a file of JSON lines") from None
    turns = tuple(_turn(path, number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not turns:
        raise ConfigError(f"the suite {path} has no prompts; write one JSON line each, or unset it")
    names = [turn.scenario_key for turn in turns]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two prompts of the suite {path} are named {twice.removeprefix(PREFIX)!r}; rename one")
    return turns


def suite_row(call: Call, *, name: str) -> dict[str, Any]:
    """Return the line of a suite file that asks every candidate the prompt of this call.

    The recorded answer is left out, because the judge compares the answers of candidate and champion.
    """
    row: dict[str, Any] = {"name": name, "messages": [dict(message) for message in call.messages]}
    if call.tools:
        row["tools"] = [dict(tool) for tool in call.tools]
    return row | {key: call.params[key] for key in _PARAMS if call.params.get(key) is not None}


def add_to_suite(path: Path, row: Mapping[str, Any]) -> int:
    """Append a line to a suite file, which is made if it is missing, and return the number of prompts in it now.

    `ConfigError` if the line or the file is malformed, a prompt of the file has the same name, or it cannot be written.
    """
    line = json.dumps(row)
    turn = _turn(path, 1, line)
    here = read_suite(path) if path.exists() and path.read_bytes().strip() else ()
    if turn.scenario_key in {each.scenario_key for each in here}:
        raise ConfigError(f"a prompt of the suite {path} is named {turn.scenario_key.removeprefix(PREFIX)!r} already")
    try:
        ended = not here or path.read_bytes().endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{'' if ended else chr(10)}{line}\n")
    except OSError as error:
        raise ConfigError(f"the suite {path} cannot be written ({error})") from None
    return len(here) + 1


def _turn(path: Path, number: int, line: str) -> Turn:
    where = f"line {number} of the suite {path}"
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a JSON object; write {{'messages': [...]}}")
    row = cast("dict[str, Any]", row)
    if unknown := sorted(row.keys() - _KNOWN):
        raise ConfigError(f"{where} has {unknown[0]!r}, which would not be sent; known are {', '.join(sorted(_KNOWN))}")
    messages = _objects(where, "messages", row.get("messages"))
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or not all(isinstance(message.get("role"), str) for message in messages):
        raise ConfigError(f"{where} has no prompt; 'messages' is a list of messages with roles, as OpenAI has them")
    name, tools = str(row.get("name", number)), _objects(where, "tools", row.get("tools", []))
    key, params = f"{PREFIX}{name}", {key: row[key] for key in _PARAMS if key in row}
    call = Call(key, key, 0.0, "suite", messages, tools=tools, params=params)
    return Turn(key, call, TrajectoryInfo(key, 0.0, name=name, scenario_key=key))


def _objects(where: str, what: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    items = cast("list[Any]", value) if isinstance(value, list) else None
    if items is None or not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"{where}: {what!r} is a list of JSON objects")
    return tuple(items)
