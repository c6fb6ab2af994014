"""The README of a policy that leaves the project: what it is, from what, and what was measured of it.

In: records alone. Out: Markdown with the hub's front matter. It says only what the ledger knows, and what it does not
know it leaves out. No texts of users, no trajectories, no names of people, no reasons that somebody typed, no path of
this machine. A licence is the user's to choose: none is stated unless given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from art_patch.types import Policy

_SNAPSHOTS = "snapshots"
_CACHED = "models--"


@dataclass(frozen=True, slots=True)
class Copied:
    """What was made of a policy.

    Attributes:
        policy: which one.
        adapter_sha256: of its LoRA's weights.
        rank: of its LoRA.
        merged_dtype: of the merged weights; `None` for the LoRA alone.
        base_id: hub id of the base, if it is known.
        license: hub id of a licence, if the user gave one.
    """

    policy: Policy
    adapter_sha256: str
    rank: int
    merged_dtype: str | None = None
    base_id: str | None = None
    license: str | None = None


def hub_id_of(base: str) -> str | None:
    """Return the hub id of a base that lies in the hub's cache, as `ORG/NAME`; `None` of any other directory."""
    parts = PurePath(base).parts
    if len(parts) < 3 or parts[-2] != _SNAPSHOTS or not parts[-3].startswith(_CACHED):
        return None
    return parts[-3].removeprefix(_CACHED).replace("--", "/")


def model_card(copied: Copied) -> str:
    """Return the card, as the content of `README.md`."""
    lines = [
        *_front_matter(copied),
        "",
        f"# {copied.policy.name}",
        "",
        *_what_it_is(copied),
        "",
        *_measured(copied.policy),
    ]
    lines += [*_watched(copied.policy), "", "## Licence", "", _licence(copied), ""]
    return "\n".join(lines)


def _front_matter(copied: Copied) -> list[str]:
    merged = copied.merged_dtype is not None
    facts: dict[str, Any] = {
        "library_name": "transformers" if merged else "peft",
        "pipeline_tag": "text-generation",
        "tags": ["art-patch"] if merged else ["art-patch", "lora"],
    }
    if copied.base_id:
        facts |= {"base_model": copied.base_id, "base_model_relation": "finetune" if merged else "adapter"}
    if copied.license:
        facts["license"] = copied.license
    # JSON is YAML, and quotes whatever a name may hold
    return ["---", *(f"{name}: {json.dumps(value)}" for name, value in facts.items()), "---"]


def _what_it_is(copied: Copied) -> list[str]:
    policy = copied.policy
    base = f"`{copied.base_id}`" if copied.base_id else "not named by its author"
    what = f"LoRA of rank {copied.rank}"
    form = (
        f"{what}, merged into the base in {copied.merged_dtype}" if copied.merged_dtype else f"{what} in PEFT's layout"
    )
    return [
        f"Step {policy.step} of the policy `{policy.model}`, trained with art_patch.",
        "",
        f"- base model: {base} (fingerprint `{policy.base_sha256}`)",
        f"- form: {form}",
        f"- LoRA's sha256: `{copied.adapter_sha256}`",
        f"- trained from: `{policy.parent}`" if policy.parent else "- trained from: not recorded",
        f"- state when it was copied: {policy.state}",
        "",
        "Here are weights and configuration, and no records. What the weights learned from records they may say.",
    ]  # fmt: skip


def _measured(policy: Policy) -> list[str]:
    gate: Any = policy.metrics.get("gate") or {}
    if "candidate" not in gate or "champion" not in gate:
        return ["## Measured", "", "No gate compared this policy with the one before it."]
    lines = [
        "## Measured",
        "",
        "Before it might serve, a judge ranked its answers on held-out scenarios, blind, against those of the policy",
        "that served. Scores lie from 0 to 1 and compare these two alone.",
        "",
        "| metric | value |",
        "|---|---|",
        f"| this policy | {gate['candidate']:.3f} |",
        f"| the policy that served | {gate['champion']:.3f} |",
    ]
    if "lower_bound" in gate:
        level = (gate.get("config") or {}).get("level")
        sure = f" with {level:.0%} confidence" if isinstance(level, float) else ""
        lines.append(f"| difference, at least{sure} | {gate['lower_bound']:+.3f} |")
    for key, words in (("scenarios", "held-out scenarios"), ("judge", "judge"), ("rubric", "rubric")):
        if gate.get(key) is not None:
            lines.append(f"| {words} | {gate[key]} |")
    failed = sum(not check.get("passed", True) for check in gate.get("checks", ()))
    if "checks" in gate:
        lines.append(f"| checks failed | {failed} of {len(gate['checks'])} |")
    return lines


def _watched(policy: Policy) -> list[str]:
    """What a test on a share of the sessions found, if there was one."""
    watch: Any = policy.metrics.get("watch") or {}
    if not watch:
        return []
    lines = [
        "",
        f"A test beside the policy that served, {watch.get('hours', 0):g} hours long, ended: {watch['verdict']}.",
    ]
    signals: dict[str, Any] = watch.get("signals") or {}
    told = [(name, one) for name, one in signals.items() if isinstance(one.get("challenger"), int | float)]
    if told:
        lines += ["", "| signal | this policy | the policy that served | comparisons |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {one['challenger']:.3g} | {one['champion']:.3g} | {one['compared']} |" for name, one in told
        ]
    return lines


def _licence(copied: Copied) -> str:
    if copied.license:
        return f"`{copied.license}`, as its author says. The base model's licence holds besides."
    return "Its author has not stated one. The base model's licence holds in any case."
