"""Promotes, tests and rejects policies, and goes back, as the commands of these names do."""

from __future__ import annotations

from art_patch import insights, pipeline, types
from art_patch.errors import ConfigError
from art_patch.web.acting import Acting, Done

_DEFAULT = {"rollback": "rolled back by hand"}


def decide(acting: Acting) -> Done:
    """Do what the form says: `what`, and `policy`, `percent` or `to`; the ledger notes the reason and who it was."""
    form, settings, ledger = acting.form, acting.project.settings, acting.project.store.ledger
    what, policy = form.get("what", ""), form.get("policy", "")
    reason = acting.text("reason")
    if what == "rollback":
        gone = pipeline.roll_back(
            settings, ledger, to=form.get("to") or None, who=acting.who("rollback"), reason=reason or _DEFAULT[what]
        )
        return Done("; ".join(filter(None, insights.rolled_back_in_words(gone))), "policies")
    if not policy:
        raise ConfigError("name the policy")
    then = f"policies/{policy}"
    if what == "reject":
        if not reason:
            raise ConfigError("say why: the ledger notes it")
        done = pipeline.reject_named(settings, ledger, policy, who=acting.who("reject"), reason=reason)
        serves = done.champion or types.UPSTREAM_ARM
        return Done(f"{policy} is rejected for good, was {done.was}; {serves} serves", then)
    if what not in ("promote", "canary", "shadow"):
        raise ConfigError(f"{what!r} is no decision; it is promote, canary, shadow, reject or rollback")
    made = pipeline.promote_named(
        settings, ledger, policy, percent=_percent(form.get("percent", "")) if what == "canary" else None,
        shadow=what == "shadow", who=acting.who("promote"), reason=reason or None,
    )  # fmt: skip
    return Done(f"{policy} {insights.promoted_in_words(made)}", then)


def _percent(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no share of the sessions in percent") from None
