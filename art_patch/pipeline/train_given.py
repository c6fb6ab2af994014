"""The data that an update learns besides its scored groups: good answers, corrections, and earlier successes.

A correction is learned whatever reward its run has, unless the run's scenario is held out. If its run is in a scored
group, it is learned together with that group. All other corrections, and rewarded runs that are in no group, are
learned only if they are newer than the champion's training: the champion's LoRA has learned the older ones already, and
learning them again in each cycle would drive it away from its base. A LoRA that starts anew learns all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from art_patch import grouping, policies, training
from art_patch.errors import ConfigError
from art_patch.pipeline.cycle_run import Cycle, CycleConfig, Run
from art_patch.rewards import rewards_G
from art_patch.types import JSON, UPSTREAM, Correction, Group, Policy, Trajectory

Scored = Sequence[tuple[Group, Sequence[float | None]]]
"""Pairs of a group and the rewards of its siblings, in the order of the siblings."""

_NEWEST = 256  # runs: people correct a handful a day, and more would outweigh what the groups of a cycle say
_NEWEST_ALONE = 1_000
_GROUPS = 64  # read whole for rehearsal: some hundred runs, as many as a large cycle reads to train on them
_ROWS = 512  # of rehearsal; an update of a hundred steps sees each once or twice
_CHECKED = 32  # calls: two renderings and an encoding each, some milliseconds for a short one, 0.1 s for a long one
CORRECTIONS_UPTO = "corrections_upto"
"""Name in a policy's metrics of the time up to which it, or what it started from, has learned all corrections."""


@dataclass(frozen=True, slots=True)
class Given:
    """The answers that an update learns besides its scored groups.

    `metrics` tell why some answers were not used, and the time up to which corrections were learned.
    """

    demonstrations: tuple[training.Row, ...] = ()  # good answers, to imitate
    pairs: tuple[training.Pair, ...] = ()  # a good and a bad answer to the same prompt
    others: tuple[str, ...] = ()  # trajectories outside of the scored groups from which these answers come
    metrics: JSON = field(default_factory=dict[str, Any])


def given_rows(run: Cycle, start: Policy, text: BaseText, scored: Scored) -> Given:
    """Return the demonstrations (setting `imitate_from`) and pairs (`prefer_from`) that an update of `start` learns.

    Of upstream's answers only those of the models in `imitate_models` are used. Raises `ConfigError` if one of these
    settings is used, but the base model has no chat template.
    """
    config = run.config.train
    since = start.metrics.get("train", {}).get(CORRECTIONS_UPTO, 0.0)
    if config.imitate_from is None and config.prefer_from is None:
        # Carried on, so that a later policy, with these settings again, does not learn them a second time.
        return Given(metrics={CORRECTIONS_UPTO: since} if since else {})
    corrections, others, held_out = _corrections(run, scored, since)
    renderer = text.renderer()
    metrics: dict[str, Any] = {CORRECTIONS_UPTO: run.now}
    rows: tuple[training.Row, ...] = ()
    pairs: tuple[training.Pair, ...] = ()
    if config.imitate_from is not None:
        alone = _rewarded_alone(run, since, config.imitate_from)
        shown = training.demonstrations(
            (*scored, *alone), corrections, renderer, least_reward=config.imitate_from, max_tokens=config.max_tokens,
            may_imitate=config.may_imitate,
        )  # fmt: skip
        rows, metrics["not_imitated"] = shown.rows, dict(Counter(shown.left_out) + held_out)
        allowed = (each for (group, _) in alone for each in group.trajectories if _may_imitate(each, config))
        others += tuple(each.id for each in allowed if each.id not in others)
    if config.prefer_from is not None:
        apart = training.preferences(
            scored, corrections, renderer, margin=config.prefer_from, max_tokens=config.max_tokens,
            may_imitate=config.may_imitate,
        )  # fmt: skip
        pairs, metrics["not_preferred"] = apart.pairs, dict(Counter(apart.left_out) + held_out)
    return Given(rows, pairs, others, metrics)


def _may_imitate(run: Trajectory, config: training.TrainConfig) -> bool:
    return any(call.policy is UPSTREAM and config.may_imitate(call.requested_model) for call in run.calls)


def _corrections(
    run: Cycle, scored: Scored, since: float
) -> tuple[list[tuple[Trajectory, list[Correction]]], tuple[str, ...], Counter[str]]:
    """Return the corrected runs, the ids of those in no scored group, and how many of these are held out."""
    siblings = {each.id: each for group, _ in scored for each in group.trajectories}
    newest = run.store.evidence.corrected(since=since, limit=_NEWEST)
    found = run.store.read.trajectories([key for key in newest if key not in siblings])
    others = {each.id: each for each in _not_held_out(run, found)}
    held_out = Counter({"held out for the gate": len(found) - len(others)})
    of_runs = run.store.evidence.corrections([*siblings, *others])
    runs = siblings | others
    return [(runs[key], theirs) for key, theirs in of_runs.items()], tuple(others), held_out


def _rewarded_alone(run: Cycle, since: float, least_reward: float) -> list[tuple[Group, tuple[float | None, ...]]]:
    """Return runs in no group that the app rewarded enough, each as a group of its own."""
    found = run.store.read.trajectories(run.store.evidence.rewarded_alone(since=since, limit=_NEWEST_ALONE))
    groups = [Group(each.id, "", "single", (each,)) for each in _not_held_out(run, found)]
    scored = [(group, tuple(rewards_G(group, combination=run.config.combination))) for group in groups]
    return [(group, (one,)) for group, (one,) in scored if one is not None and one >= least_reward]


def _not_held_out(run: Cycle, found: Sequence[Trajectory]) -> list[Trajectory]:
    """Return those runs that may be learned from, by their own keys or words and, if the setting is on, their users."""
    config = run.config
    keys = {each.id: key for each in found if (key := scenario_key_of(each, config)) is not None}
    known = run.store.read.known_scenarios(set(keys.values()))

    def is_held_out(each: Trajectory) -> bool:
        key, user = keys.get(each.id), each.info.user_id
        if config.holdout_users and user is not None and grouping.is_user_held_out(user, config.holdout_share):
            return True
        if key is None or key in known:
            return key is not None and known[key].held_out
        # Of users, the first one with this key decides, and it may yet be one who is held out.
        return config.holdout_users or grouping.is_held_out(key, config.holdout_share)

    return [each for each in found if not is_held_out(each)]


def scenario_key_of(run: Trajectory, config: CycleConfig) -> str | None:
    """Return the key of a run's scenario, which the app gave or its task has; `None` for a run without calls."""
    if (given := grouping.given_scenario(run)) is not None:
        return given[0]
    return grouping.task_key(grouping.task_of(run.calls[0], across=config.across)) if run.calls else None


def rehearsal_rows(run: Cycle, champion: Policy) -> tuple[tuple[training.Row, ...], tuple[str, ...], JSON]:
    """Return earlier successes of the same model, which an update imitates so that they are not forgotten.

    These are rows of runs with a reward of at least `rehearse_from`, newest first, the runs' ids, and metrics.
    """
    config = run.config.train
    if config.rehearse_from is None:
        return (), (), {}
    left_out: Counter[str] = Counter()
    rows: dict[training.Row, str] = {}
    for trajectory in _successes(run, champion, config.rehearse_from, left_out):
        found, _ = training.rows_and_report(
            trajectory, max_tokens=config.max_tokens, learn_truncated=config.learn_truncated
        )
        # Without log-probabilities: these rows are imitated, and compared with no policy. Siblings often give the same
        # answer. Each row is learned once, or frequent answers would crowd out others.
        imitated = [replace(row, logprobs_T=(0.0,) * len(row.ids_T)) for row in found]
        new = [row for row in imitated if row not in rows]
        rows |= dict.fromkeys(new[: _ROWS - len(rows)], trajectory.id)
        if not new:
            left_out["nothing in it is new" if found else "nothing in it may be trained"] += 1
    metrics = {"rows": len(rows), "left_out": dict(left_out)}
    return tuple(rows), tuple(dict.fromkeys(rows.values())), {"rehearsal": metrics}


def _successes(run: Cycle, champion: Policy, least: float, left_out: Counter[str]) -> Iterator[Trajectory]:
    """Yield this model's runs with enough reward from earlier training groups; count all others in `left_out`."""
    read = run.store.read
    newest = read.group_ids(state="trained", held_out=False, limit=_GROUPS)[::-1]
    for group in read.groups_of(newest):
        corrected = run.store.evidence.corrections([each.id for each in group.trajectories])
        rewards = rewards_G(group, combination=run.config.combination)
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            if reward is None or reward < least:
                left_out["no reward" if reward is None else "reward too low"] += 1
            elif trajectory.id in corrected:
                left_out["somebody corrected it"] += 1
            elif {call.policy.rpartition("@")[0] for call in trajectory.calls if call.policy} != {champion.model}:
                left_out["not sampled by this model"] += 1
            else:
                yield trajectory


@dataclass(frozen=True, slots=True)
class BaseText:
    """A base model's tokenizer and chat template, and how well they reproduce the recorded tokens."""

    tokenizer: Any  # of transformers; `None` if the base has none with a chat template
    family: training.Family
    why_not: str | None = None  # why there is no tokenizer
    found: training.RoundTrips | None = None  # how recorded tokens differ from those that the template gives

    def renderer(self) -> training.Renderer:
        """Return a renderer that makes the same prompts as the engine; a `ConfigError` if the base has no template."""
        if self.tokenizer is None or self.found is None:
            raise ConfigError(
                f"what upstream or people said cannot be learned: {self.why_not}; put the tokenizer beside the base's "
                "weights, or train without imitate_from and prefer_from"
            )
        return training.Renderer(self.tokenizer, self.family, self.found.engine)


def base_text(base: str, runs: Sequence[Trajectory]) -> BaseText:
    """Return the base's tokenizer and chat template, or why they are missing: groups are trained by token ids alone."""
    from transformers import AutoTokenizer  # seconds of import; the update needs transformers anyhow

    family = training.family_of(policies.read_config(base).model_type)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(base)
    except Exception as error:  # OSError, ValueError, ImportError, and the package tokenizers raises bare `Exception`
        return BaseText(None, family, f"the base has no tokenizer that can be read ({type(error).__name__})")
    if not tokenizer.chat_template:
        return BaseText(None, family, "the base has no chat template")
    found = training.check_round_trips(runs, tokenizer, family=family, limit=_CHECKED)
    return BaseText(tokenizer, family, found=found)


def round_trip_metrics(run: Run, text: BaseText) -> dict[str, Any]:
    """Return how often recorded tokens differ from the tokens that the chat template gives, as metrics."""
    if text.found is None:
        return {"not_checked": text.why_not}
    if text.found.differences:
        # An example quotes a user's words. It goes into the cycle's report only, where `report` can cut it out, and
        # never into the metrics of the policy, which stay when the user is erased.
        run.metrics["round_trips"] = {"first": replace(text.found, examples=text.found.examples[:1]).as_text()}
    return text.found.metrics()
