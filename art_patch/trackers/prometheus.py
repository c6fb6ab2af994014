"""Formats the numbers of `art-patch status` as Prometheus text, version 0.0.4, without any text of users. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from art_patch.types import JSON, Mode

# Counts of the store are gauges, because `prune` and `erase` lower them. Counts of an app's process are counters.
_RECORDED = {
    "calls": "Calls that apps made, copies not counted.",
    "calls_by_policy": "Calls that one of our policies answered.",
    "calls_fell_back": "Calls that were meant for a policy and went upstream.",
    "calls_engine_full": "Those of them that the engine had no room for.",
    "calls_not_ok": "Calls that failed, were cancelled or abandoned.",
    "calls_trainable": "Calls that can be trained on.",
    "calls_shadow": "Runs with a call that was asked in the background.",
    "calls_resampled": "Runs with a turn that was answered again.",
    "trajectories": "Runs of the agent.",
    "scenarios": "Tasks that were grouped.",
    "scores": "Judgements of users, code and judges.",
}
_JUDGE = {
    "calls": "Requests to the judge.",
    "prompt_tokens": "Prompt tokens of the judge.",
    "completion_tokens": "Completion tokens of the judge.",
    "cost_usd": "What the judge took, as far as prices are known, in US dollars.",
    "unpriced": "Requests to the judge of unknown price.",
}
_APP = {
    "recorded": "Calls that the process recorded.",
    "dropped": "Runs and calls that the process could not record.",
    "fallbacks": "Calls of the process that went upstream although they were meant for a policy.",
    "engine_full": "Those fallbacks of the process that the engine had no room for.",
    "shadowed": "Calls of the process that were asked in the background, too.",
}

Samples = Sequence[tuple[Mapping[str, str], float]]  # labels and value of each sample of a metric


def exposition(facts: JSON, *, version: str) -> str:
    """Return the output of `art-patch status --json` as Prometheus text. Shares are 0 to 1, not percentages."""
    mine = {"project": str(facts["project"])}
    recorded = facts["recorded"]
    # A sample for each mode, 0 or 1, so that a query over time sees a mode end.
    modes = [(mine | {"mode": mode}, mode == facts["mode"]) for mode in get_args(Mode)]
    last = [] if recorded["last_call_at"] is None else [(mine, recorded["last_call_at"])]
    untrainable = recorded["untrainable"]
    lines = [
        *_metric("art_patch_info", "Version of art_patch.", [(mine | {"version": version}, 1)]),
        *_metric("art_patch_mode", "1 for the mode that the project is in.", modes),
        *_policies(facts, mine),
        *_counts("art_patch_", _RECORDED, recorded, mine),
        *_by_label("art_patch_groups", "Groups of siblings by state.", "state", recorded["groups"], mine),
        *_by_label("art_patch_calls_untrainable", "Calls that cannot be trained on.", "reason", untrainable, mine),
        *_metric("art_patch_last_call_timestamp_seconds", "When the newest call began.", last),
        *_counts("art_patch_judge_", _JUDGE, recorded["judge"], mine),
        *_apps(facts["apps"], mine),
    ]
    return "".join(f"{line}\n" for line in lines)


def _metric(name: str, help: str, samples: Samples, kind: Literal["gauge", "counter"] = "gauge") -> Iterable[str]:
    if samples:  # else a metric would be announced that has no value
        yield f"# HELP {name} {_escaped(help)}"
        yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        inner = ",".join(f'{key}="{_quoted(text)}"' for key, text in labels.items())
        yield f"{name}{{{inner}}} {float(value)!r}"


def _counts(prefix: str, helps: Mapping[str, str], counts: JSON, mine: Mapping[str, str]) -> Iterable[str]:
    for name, help in helps.items():
        yield from _metric(f"{prefix}{name}", help, [(mine, counts[name])])


def _by_label(name: str, help: str, label: str, counts: Mapping[str, int], mine: Mapping[str, str]) -> Iterable[str]:
    return _metric(name, help, [({**mine, label: key}, count) for key, count in sorted(counts.items())])


def _policies(facts: JSON, mine: Mapping[str, str]) -> Iterable[str]:
    champion, challenger = facts["champion"], facts["challenger"]
    states = Counter(str(policy["state"]) for policy in facts["policies"])
    yield from _by_label("art_patch_policies", "Policies by state.", "state", states, mine)
    if champion is not None:
        step = [({**mine, "policy": champion}, int(champion.rpartition("@")[2]))]
        yield from _metric("art_patch_champion_step", "Step of the policy that serves.", step)
    # Without a test the metric is left out. A share of 0 would look like a test that nobody takes part in.
    if challenger is not None:
        # A shadow answers no session.
        share = 0.0 if challenger["percent"] is None else challenger["percent"] / 100
        labels = {**mine, "policy": str(challenger["policy"]), "state": str(challenger["state"])}
        yield from _metric("art_patch_challenger_share", "Share of the sessions it answers.", [(labels, share)])
    if facts["engine"]["base_url"]:
        up = [(mine, bool(facts["engine"]["healthy"]))]
        yield from _metric("art_patch_engine_up", "1 if the engine that apps are sent to answers.", up)


def _apps(apps: Iterable[Mapping[str, Any]], mine: Mapping[str, str]) -> Iterable[str]:
    told = [({**mine, "process": str(app["id"])}, app) for app in apps]
    for name, help in _APP.items():
        counts = [(mine, app.get(name, 0)) for mine, app in told]
        yield from _metric(f"art_patch_app_{name}_total", help, counts, "counter")
    bypassed = [
        ({**mine, "bypass": name}, count) for mine, app in told for name, count in sorted(app["bypasses"].items())
    ]
    help = "Calls of the process that went past the patch."
    yield from _metric("art_patch_app_bypassed_total", help, bypassed, "counter")
    last = [(mine, app["at"]) for mine, app in told]
    yield from _metric("art_patch_app_last_seen_timestamp_seconds", "When the process last reported.", last)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    # In labels quotes are escaped, too; in HELP lines they must not be.
    return _escaped(text).replace('"', r"\"")
