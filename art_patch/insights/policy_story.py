"""Where a policy comes from, what it learned from, its tests, and how long it served: for `policies show` and its page.

Of the policies that serve now, also its share of the sessions, its test on traffic so far, and the users' rewards. All
of it is read from the store, none from the policy's files, so it can be told of a policy whose files are gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from art_patch import pipeline, promotion, store, training, types
from art_patch._lib.words import ago, counted, listed
from art_patch.errors import NotFound
from art_patch.insights import policy_words
from art_patch.settings import Settings

NOT_ON_RECORD = "not on record"  # a fact that the release which made the policy did not keep

Row = tuple[str, str]
"""A name and the words beside it; without a name, the words go on from the row above."""


@dataclass(frozen=True, slots=True)
class PolicyStory:
    """All that the store tells about a policy."""

    policy: types.Policy
    parents: tuple[str, ...]  # from which it was trained, the nearest first
    children: tuple[str, ...]
    learned: store.Learned
    served_s: dict[str, float]  # state -> seconds
    history: list[types.JSON]  # its moves, newest first

    @property
    def facts(self) -> dict[str, Any]:
        """The story as JSON."""
        facts = asdict(self)
        return facts.pop("policy") | facts | {"made": self.policy.metrics.get("made")}

    def rows(self, now: float) -> list[Row]:
        """Return the story in words, a row for each thing."""
        return [*_rows(self, now)]


def story_of(opened: store.Store, name: str, *, now: float, learned: store.Learned | None = None) -> PolicyStory:
    """Return the story of a policy in any state; `learned` if the caller has read that already.

    Raises `NotFound` if there is no such policy.
    """
    known = {each.name: each for each in opened.ledger.policies()}
    if (found := known.get(name)) is None:
        raise NotFound(f"there is no policy {name!r}; `art-patch policies` lists them")
    learned = opened.reports.learned(name) if learned is None else learned
    moves = opened.ledger.history(limit=None, policy=name)
    children = sorted(each.name for each in known.values() if each.parent == name)
    return PolicyStory(
        found, tuple(_parents(found, known)), tuple(children), learned, time_in_states(moves, now), moves
    )


def time_in_states(moves: Sequence[types.JSON], now: float) -> dict[str, float]:
    """Return the seconds that a policy spent in each state, from its moves, newest first."""
    spent: dict[str, float] = {}
    until = now
    for move in moves:
        spent[move["to_state"]] = spent.get(move["to_state"], 0.0) + max(0.0, until - move["at"])
        until = move["at"]
    return spent


def _parents(policy: types.Policy, known: dict[str, types.Policy]) -> list[str]:
    found: list[str] = []
    at: types.Policy | None = policy
    # A store that was put together by hand may have a circle.
    while at is not None and at.parent is not None and at.parent not in found:
        found.append(at.parent)
        at = known.get(at.parent)
    return found


def _rows(story: PolicyStory, now: float) -> Iterator[Row]:
    policy, made = story.policy, _made(story.policy)
    by = f"art_patch {made['art_patch']}" if made else f"art_patch's version is {NOT_ON_RECORD}"
    is_imported = types.IMPORTED in policy.metrics
    if not is_imported:
        made_at = f"{_when(policy.created_at)}, {ago(now - policy.created_at)} ago"
        yield "made", made_at + (f"; {by}" if story.parents else "")
    yield "base", f"{policy.base} (fingerprint {policy.base_sha256[:12]})"
    if is_imported:
        yield from _evidence(policy)
    elif story.parents:
        yield "parents", " < ".join(story.parents)
        yield from _update(policy, story.learned)
    else:
        yield "parents", "none: it is the base model, which no update made"
    if story.children:
        yield "children", ", ".join(story.children)
    yield "served", _served(story.served_s, story.learned)


def _evidence(policy: types.Policy) -> Iterator[Row]:
    """Yield what an imported policy brought along, all of which is about the project that it comes from."""
    origin: Any = policy.metrics[types.IMPORTED]
    evidence = origin["evidence"]
    state = f", where it was {evidence['state']}" if evidence.get("state") else ""
    yield "imported", f"{_when(origin['at'])}, from {evidence['policy']}{state}"
    if (by := policy_words.rejected_there(policy)) is not None:
        yield "rejected", f"there, {by}"
    what = "manifest" if "manifest_sha256" in origin else "weights"  # a plain LoRA has no manifest
    yield "copy", f"its {what} ha{'s' if what == 'manifest' else 've'} the sha256 {origin[f'{what}_sha256']}"
    by, at = evidence.get("art_patch"), evidence.get("made_at")
    yield "trained", f"{_when(at) if at else NOT_ON_RECORD}, with art_patch {by or NOT_ON_RECORD}"
    yield "parents", f"{evidence.get('parent') or NOT_ON_RECORD} there, none here"
    judges = [f"{each['judge']}, rubric {each['rubric'] or NOT_ON_RECORD}" for each in evidence.get("judges", ())]
    yield "judge", "; ".join(judges) or "none is named"
    yield "settings", _settings(evidence["settings"]) if evidence.get("settings") else NOT_ON_RECORD
    yield from _training(evidence.get("train") or {})
    gate = evidence.get("gate")
    yield "gate there", f"{policy_words.gate_in_words(gate)}{_judge_of(gate)}" if gate else "no gate is on record"
    canary = evidence.get("watch")
    yield "canary there", policy_words.canary_in_words(canary) if canary else "no canary test is on record"


def _update(policy: types.Policy, learned: store.Learned) -> Iterator[Row]:
    train: Any = policy.metrics.get("train") or {}
    groups = counted(len(learned.groups), "group", "groups")
    erased = len(learned.groups) - learned.groups_there
    runs = counted(len(learned.runs), "of its runs is", "of their runs are") + " in the store"
    alone = f", and {counted(learned.alone, 'run', 'runs')} in no group" if learned.alone else ""
    lost = f"; {counted(erased, 'group is', 'groups are')} erased" if erased else ""
    files = listed([f"{name} (sha256 {digest[:12]})" for name, digest in train.get("files", {}).items()], "")
    yield "learned from", f"the files {files}" if files else f"{groups}, {runs}{alone}{lost}"
    named = [(each["judge"], each["rubric"]) for each in _made(policy).get("judges", ())]
    judges = [f"{judge}, rubric {rubric or NOT_ON_RECORD}" for judge, rubric in named or learned.judges]
    none = "none: the rewards came from users or code" if _made(policy) else NOT_ON_RECORD
    yield "judge", "; ".join(judges) or ("none: files have no rewards" if files else none)
    config = train.get("config")
    yield "seed", str(config["seed"]) if config and "seed" in config else NOT_ON_RECORD
    yield "settings", _settings(config) if config else NOT_ON_RECORD
    yield from _training({name: value for name, value in train.items() if name != "files"})
    gate: Any = policy.metrics.get("gate") or {}
    yield "gate", f"{policy_words.gate_in_words(gate)}{_judge_of(gate)}" if gate else "no gate has tested it"
    if watch := policy.metrics.get("watch"):
        yield "canary", policy_words.canary_in_words(watch)


def _judge_of(gate: Any) -> str:
    return f"; judge {gate['judge']}, rubric {gate.get('rubric') or NOT_ON_RECORD}" if gate.get("judge") else ""


def _training(numbers: Any) -> Iterator[Row]:
    for index, line in enumerate(policy_words.training_in_words(numbers) or [NOT_ON_RECORD]):
        yield "" if index else "training", line


def _settings(config: types.JSON) -> str:
    """Return the settings of an update that are not the defaults of this release."""
    # Through JSON's types: the store has lists where a config has tuples.
    usual = {
        key: list(value) if isinstance(value, tuple) else value for key, value in asdict(training.TrainConfig()).items()
    }
    other = {key: value for key, value in config.items() if key not in usual or usual[key] != value}
    words = ", ".join(f"{key} {value}" for key, value in sorted(other.items()) if key != "seed")
    return f"as this release has them, but {words}" if words else "as this release has them; --json has all"


def _served(served: dict[str, float], learned: store.Learned) -> str:
    spent = [f"{ago(served[state])} as {state}" for state in ("champion", "canary") if state in served]
    calls = counted(learned.answered, "call", "calls")
    copies = f", and {counted(learned.copies, 'copy', 'copies')} in the background" if learned.copies else ""
    return f"{listed(spent, 'never')}; {calls} of apps in the store, answered by it{copies}"


def _made(policy: types.Policy) -> dict[str, Any]:
    made: Any = policy.metrics.get("made")
    return made or {}


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


# --- what serves and is tested now ---


def canary_config(settings: Settings) -> promotion.CanaryConfig:
    """Return the rules of the canary test that the project's settings contain."""
    return promotion.CanaryConfig(
        min_sessions=settings.canary_sessions,
        max_hours=settings.canary_hours,
        margin=settings.canary_margin,
        max_loss=settings.max_loss,
        latency_ratio=settings.canary_latency_ratio,
        rest_s=settings.canary_rest_s,
        silence_s=settings.canary_silence_s,
        ramp=promotion.RAMP if settings.canary_ramp else (),
    )


def running_test(settings: Settings, opened: store.Store, *, now: float) -> types.JSON | None:
    """Return what `art-patch watch --once` finds, how the proofs grew, and the time left; `None` without a test."""
    config = canary_config(settings)
    report, proofs = pipeline.look_without_acting(opened, config, now=now)
    if report.challenger is None:
        return None
    left, signals = policy_words.time_left(report, config), dict[str, Any](report.metrics["signals"])
    facts: dict[str, Any] = {
        "proofs": {
            name: [each._asdict() for each in path] for name, path in proofs.items() if "worse" in signals.get(name, {})
        },
        "time_left": left,
        "time_left_words": None if left is None else policy_words.time_left_in_words(left),
        "at": now,
    }
    return asdict(report) | facts


def percent_of(policy: types.Policy, route: types.Route) -> float | None:
    """Return the percentage of the sessions that a policy answers, or `None` if it answers none."""
    # The champion answers all sessions that the canary does not.
    canary = (route.challenger_percent or 0.0) if route.challenger_state == "canary" else 0.0
    if policy.name == route.champion:
        return 100 - canary
    return canary if canary and policy.name == route.challenger else None


def own_rewards(opened: store.Store, *names: str, now: float) -> dict[str, dict[str, float]]:
    """Return the mean reward that users and the app gave these policies' runs of the last 28 days, and their number."""
    runs = opened.reports.usage(since=now - store.CONTROL_S, until=now).runs
    found = dict[str, dict[str, float]]()
    for name in names:
        own = [run for run in runs if (run.policy or types.UPSTREAM_ARM) == name and not run.copy]
        its = [run.reward for run in own if run.reward is not None]
        if its:
            found[name] = {"reward": sum(its) / len(its), "runs": len(its)}
    return found
