"""Says in words what gates, canary tests and other projects found about a policy, from the metrics in the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from art_patch import pipeline, promotion, types
from art_patch._lib.words import ago, counted, listed, seconds

_TRAINING = {
    "from": ("start", "groups", "dead_groups", "within_noise", "trajectories", "demonstrations", "pairs", "rehearsed"),
    "rewards": ("mean_reward", "reward_noise"),
    "rows": ("rows", "trained_rows", "tokens", "far_rows"),
    "update": ("steps", "loss", "grad_norm", "clip_fraction", "effective_share", "entropy_nats", "not_finite"),
    "moved": ("kl_nats", "update_kl_nats", "reference_kl_nats"),
    "tokens exact": ("round_trips", "logprob_gap_nats", "logprob_gap_mean_nats"),
    "cost": ("took_s", "tokens_per_s", "computed_tokens", "distinct_tokens", "shared_ratio"),
}
"""What a row of an update's numbers is about -> their names."""

_ARMS = ("challenger", "champion")


def gate_in_words(gate: Any) -> str:
    """Return the metrics of a gate in words. A gate that stopped early has not measured all of them."""
    words: list[str] = []
    if "candidate" in gate and "champion" in gate:
        words.append(f"{gate['candidate']:.3f} against {gate['champion']:.3f}")
    if "lower_bound" in gate:
        words.append(f"difference above {gate['lower_bound']:+.3f}")
    if "scenarios" in gate:
        words.append(f"{gate['scenarios']} scenarios")
    if gate.get("checks_failed"):  # of a gate elsewhere; here, the reason names the checks
        words.append(f"{gate['checks_failed']} of {gate['checks']} checks failed")
    return listed(words, "-")


def canary_in_words(canary: Any) -> str:
    """Return the result of a canary test in words, with its numbers as the reasons of the ledger have them."""
    signals = (
        f"{name.removesuffix('_ms')} {' against '.join(signal_value(name, one[arm]) for arm in _ARMS)}"
        for name, one in (canary.get("signals") or {}).items()
        if one.keys() >= set(_ARMS)
    )
    return "; ".join((f"{canary['verdict']} after {ago(3600 * (canary.get('hours') or 0.0))}", *signals))


def rejected_there(policy: types.Policy) -> str | None:
    """Return what an imported policy was rejected by in the project that it comes from; `None` if it was not."""
    origin: Any = policy.metrics.get(types.IMPORTED) or {}
    evidence = origin.get("evidence") or {}
    if evidence.get("rejected_by") is None and evidence.get("state") != "rejected":
        return None
    gate, canary = (evidence.get(name) or {} for name in ("gate", "watch"))
    return {
        "gate": f"by its gate: {gate_in_words(gate)}",
        "canary test": f"by its canary test: {canary_in_words(canary)}" if canary else "by its canary test",
        "decision": "by a person, or because the champion changed while it was tested",
    }.get(evidence.get("rejected_by") or "", "for a reason that its manifest does not tell")


def signal_value(signal: str, value: float) -> str:
    """Return a signal's value as the ledger's reasons have it."""
    return f"{value:,.0f} ms" if signal.endswith("_ms") else f"{value:.3f}"


def time_left(report: pipeline.WatchReport, config: promotion.CanaryConfig) -> types.JSON | None:
    """Return the hours that a test probably takes until it is decided, and the least and most; `None` if it is over.

    `hours` is `None` while nothing points to a winner, and `hours_at_least` if no session comes.
    """
    metrics: Any = report.metrics
    if report.outcome != "goes on" or "sessions_needed" not in metrics:
        return None
    share, a_day = (report.percent or 0.0) / 100, metrics["sessions_a_day"]
    # A promotion takes so many sessions of each policy, whatever they prove.
    lacks = [
        max(0, config.min_sessions - metrics[arm]["sessions"]) / its
        for arm, its in (("challenger", share), ("champion", 1 - share))
        if its > 0
    ]
    least = 24 * max(lacks) / a_day if a_day else None
    needed = metrics["sessions_needed"]
    hours = None if needed is None or least is None else max(24 * needed / a_day, least)
    most = max(0.0, config.max_hours - (metrics["hours"] or 0.0))
    return {"hours": hours, "hours_at_least": least, "hours_at_most": most}


def time_left_in_words(left: types.JSON) -> str:
    """Return what `time_left` found in words."""
    hours, least, most = left["hours"], left["hours_at_least"], ago(3600 * left["hours_at_most"])
    if hours is not None and hours > left["hours_at_most"]:
        return f"time left: {most}, and a proof would take {ago(3600 * hours)} at this pace"
    if hours is not None:
        return f"time left: about {ago(3600 * hours)}, if it goes on like this; at most {most}"
    begun = f"at least {ago(3600 * least)}, until there are sessions enough; " if least else ""
    return f"time left: {begun}at most {most}; nothing points to a winner yet"


def training_in_words(numbers: Mapping[str, Any]) -> list[str]:
    """Return the numbers of an update as lines, each about one thing. What is 0 or not known is left out."""
    left = {key: value for key, value in numbers.items() if key not in pipeline.LONG and _counts(value)}
    lines = {name: [_number(key, left.pop(key)) for key in keys if key in left] for name, keys in _TRAINING.items()}
    lines["else"] = [_number(key, value) for key, value in left.items()]
    return [f"{name}: {', '.join(its)}" for name, its in lines.items() if its]


def _counts(value: Any) -> bool:
    return any(map(_counts, value.values())) if isinstance(value, dict) else value not in (None, 0, "", False)


def _number(key: str, value: Any) -> str:
    if isinstance(value, dict):
        its = cast("dict[str, Any]", value)
        inner = [_number(name, each) for name, each in its.items() if _counts(each) and name != key]
        whole = f"{key.replace('_', ' ')} {its[key]:,}" if isinstance(its.get(key), int) else key.replace("_", " ")
        return f"{whole} ({', '.join(inner)})" if inner else whole
    name, unit = key, ""
    if key.endswith("_nats"):
        name, unit = key.removesuffix("_nats"), " nats"
    elif key.endswith("_s") and key.startswith("took"):
        return f"took {seconds(value)}"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{name.replace('_', ' ')} {shown}{unit}"


def promoted_in_words(done: pipeline.Promoted) -> str:
    """Return what a promotion, or the begin of a test, brings: the policy's name stands before it."""
    rival, control = done.before or types.UPSTREAM_ARM, done.control_percent
    if done.state == "shadow":
        return f"is asked in the background what apps ask; {rival} serves"
    if done.state == "canary":
        said = f"answers {done.percent or 0:g} % of the sessions, {rival} all others"
        if control and not done.before:  # beside a champion the control group stays as it is
            said += f"; if it wins, {control:g} % of the sessions stay with upstream, as a control group"
        return said
    if control:
        return f"serves, but for {control:g} % of the sessions, the control group (`art-patch mode --control`)"
    return "serves"


def rolled_back_in_words(done: pipeline.RolledBack) -> tuple[str, str]:
    """Return what becomes of the policy whose test has ended, empty without one, and who answers."""
    serves = f"{done.target} {'answers every session' if done.target == done.before else 'serves again'}"
    if done.target == done.before and done.test_ended is None:
        serves = f"nothing to do: {done.target} answers already"
    if not done.test_ended:
        return "", serves
    return f"{done.test_ended} {'is trained on' if done.state == 'learner' else f'is {done.state}'}", serves


def worse_in_words(rewards: Mapping[str, Mapping[str, float]], before: str, target: str) -> str | None:
    """Return that users and the app gave the runs of `target` lower rewards than those of `before`, if they did.

    `rewards` is what `own_rewards` returned of both.
    """
    if before not in rewards or target not in rewards or rewards[target]["reward"] >= rewards[before]["reward"]:
        return None
    counts = {name: counted(int(rewards[name]["runs"]), "run", "runs") for name in (target, before)}
    each = [f"{name} {rewards[name]['reward']:.3f} in {count}" for name, count in counts.items()]
    return f"by the app's own rewards that is worse: {' against '.join(each)}"
