"""Formats the numbers of `art-patch status` as Prometheus text, version 0.0.4, without any text of users. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from art_patch.types import JSON, Mode

# Counts of the store are gauges, because `prune` and `erase` lower them. Counts of an app's process only grow until the
# process ends, so they are counters.
_RECORDED = {
    "calls": "Calls that apps made, copies not counted.",
    "calls_by_policy": "Calls that one of our policies answered.",
    "calls_fell_back": "Calls that were meant for a policy and went upstream.",
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
    "shadowed": "Calls of the process that were asked in the background, too.",
}


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    samples: Sequence[tuple[Mapping[str, str], float]] = ()

    def lines(self) -> Iterable[str]:
        yield f"# HELP {self.name} {_escaped(self.help)}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.samples:
            inner = ",".join(f'{key}="{_quoted(text)}"' for key, text in labels.items())
            yield f"{self.name}{{{inner}}} {float(value)!r}"


def exposition(facts: JSON, *, version: str) -> str:
    """Return the output of `art-patch status --json` as Prometheus text. Shares are 0 to 1, not percentages."""
    mine = {"project": str(facts["project"])}
    families = [
        _Family("art_patch_info", "Version of art_patch.", samples=[(mine | {"version": version}, 1)]),
        _Family(
            "art_patch_mode",
            "1 for the mode that the project is in.",
            # A sample for each mode, 0 or 1, so that a query over time sees a mode end.
            samples=[(mine | {"mode": mode}, mode == facts["mode"]) for mode in get_args(Mode)],
        ),
        *_policies(facts, mine),
        *_counts("art_patch_", _RECORDED, facts["recorded"], mine),
        *_by_label(facts["recorded"], mine),
        *_counts("art_patch_judge_", _JUDGE, facts["recorded"]["judge"], mine),
        *_apps(facts["apps"], mine),
    ]
    # A family without samples would announce a metric that has no value.
    return "".join(f"{line}\n" for family in families if family.samples for line in family.lines())


def _counts(prefix: str, helps: Mapping[str, str], counts: JSON, mine: Mapping[str, str]) -> Iterable[_Family]:
    for name, help in helps.items():
        yield _Family(f"{prefix}{name}", help, samples=[(mine, counts[name])])


def _policies(facts: JSON, mine: Mapping[str, str]) -> Iterable[_Family]:
    champion: str | None = facts["champion"]
    challenger: JSON | None = facts["challenger"]
    states = Counter(policy["state"] for policy in facts["policies"])
    engine = facts["engine"]
    yield _Family(
        "art_patch_policies",
        "Policies by state.",
        samples=[({**mine, "state": state}, count) for state, count in sorted(states.items())],
    )
    yield _Family(
        "art_patch_champion_step",
        "Step of the policy that serves.",
        samples=() if champion is None else [({**mine, "policy": champion}, int(champion.rpartition("@")[2]))],
    )
    # Without a test the family is left out. A share of 0 would look like a test that nobody takes part in.
    if challenger is not None:
        # A shadow answers no session.
        share = 0.0 if challenger["percent"] is None else challenger["percent"] / 100
        labels = {**mine, "policy": str(challenger["policy"]), "state": str(challenger["state"])}
        yield _Family("art_patch_challenger_share", "Share of the sessions it answers.", samples=[(labels, share)])
    yield _Family(
        "art_patch_engine_up",
        "1 if the engine that apps are sent to answers.",
        samples=[(mine, bool(engine["healthy"]))] if engine["base_url"] else (),
    )


def _by_label(recorded: JSON, mine: Mapping[str, str]) -> Iterable[_Family]:
    for name, label, help, counts in (
        ("art_patch_groups", "state", "Groups of siblings by state.", recorded["groups"]),
        ("art_patch_calls_untrainable", "reason", "Calls that cannot be trained on.", recorded["untrainable"]),
    ):
        yield _Family(name, help, samples=[({**mine, label: key}, count) for key, count in sorted(counts.items())])
    if recorded["last_call_at"] is not None:
        yield _Family(
            "art_patch_last_call_timestamp_seconds",
            "When the newest call began.",
            samples=[(mine, recorded["last_call_at"])],
        )


def _apps(apps: Iterable[Mapping[str, Any]], mine: Mapping[str, str]) -> Iterable[_Family]:
    told = [({**mine, "process": str(app["id"])}, app) for app in apps]
    for name, help in _APP.items():
        samples = [(labels, app[name]) for labels, app in told]
        yield _Family(f"art_patch_app_{name}_total", help, "counter", samples)
    yield _Family(
        "art_patch_app_bypassed_total",
        "Calls of the process that went past the patch.",
        "counter",
        [
            ({**labels, "bypass": name}, count)
            for labels, app in told
            for name, count in sorted(app["bypasses"].items())
        ],
    )
    yield _Family(
        "art_patch_app_last_seen_timestamp_seconds",
        "When the process last reported.",
        samples=[(labels, app["at"]) for labels, app in told],
    )


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    # In labels quotes are escaped, too; in HELP lines they must not be.
    return _escaped(text).replace('"', r"\"")
