"""Says in words what gates, canary tests and other projects found about a policy, from the metrics in the ledger."""

from __future__ import annotations

from typing import Any

from art_patch import types
from art_patch.cli import output

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
    return output.listed(words, "-")


def canary_in_words(canary: Any) -> str:
    """Return the result of a canary test in words, with its numbers as the reasons of the ledger have them."""
    signals = (
        f"{name.removesuffix('_ms')} {' against '.join(signal_value(name, one[arm]) for arm in _ARMS)}"
        for name, one in (canary.get("signals") or {}).items()
        if one.keys() >= set(_ARMS)
    )
    return "; ".join((f"{canary['verdict']} after {output.ago(3600 * (canary.get('hours') or 0.0))}", *signals))


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
    }.get(evidence.get("rejected_by"), "for a reason that its manifest does not tell")


def warn_if_rejected_there(policy: types.Policy | None) -> None:
    """Say so if an imported policy was rejected in the project that it comes from."""
    if policy is not None and (by := rejected_there(policy)) is not None:
        said = f"[red]careful[/]: {policy.name} was [b]rejected[/] where it comes from, {output.escape(by)}"
        output.stderr().print(said, soft_wrap=True)


def signal_value(signal: str, value: float) -> str:
    """Return a signal's value as the ledger's reasons have it."""
    return f"{value:,.0f} ms" if signal.endswith("_ms") else f"{value:.3f}"
