"""`art-patch notify` tries the addresses that get messages about decisions; a job tells them at its end."""

from __future__ import annotations

import time
from typing import Any

import typer

from art_patch import insights, notifications, store
from art_patch.cli import output
from art_patch.cli.options import Output
from art_patch.cli.typed_options import command
from art_patch.errors import ConfigError, TrackerError
from art_patch.settings import Settings, load_settings

_ADVICE_S = 7 * 86_400.0  # the period of `art-patch report`


@command
def notify(out: Output) -> None:
    """Send a test message to each address in ART_PATCH_NOTIFY, which `serve` and `retrain` tell of decisions.

    Exit codes: 0 all were sent; 2 there is no address, or one is wrong; 17 one was not sent.
    """
    settings = load_settings()
    if settings.notify is None:
        raise ConfigError(
            "ART_PATCH_NOTIFY is not set; it takes addresses such as slack://..., mailto://... or jsons://host/path"
        )
    message = notifications.of_test(settings.project)
    causes = {address.name: address.send(message) for address in notifications.addresses(settings.notify)}
    facts = [{"address": name, "sent": cause is None, "cause": cause} for name, cause in causes.items()]
    if not out.answered({"project": settings.project, "addresses": facts}):
        for name, cause in causes.items():
            mark = "[green]sent[/]" if cause is None else "[red]not sent[/]"
            output.stdout().print(f"{mark} {output.escape(name)}" + (f": {output.escape(cause)}" if cause else ""))
    if any(causes.values()):
        raise typer.Exit(TrackerError.exit_code)


def tell_people(opened: store.Store, settings: Settings, report: dict[str, Any]) -> None:
    """Send what was decided and what a cycle's report says, if there is an address; what fails is logged."""
    notifier = notifications.Notifier(settings.notify, settings.project, opened)
    if not notifier.is_on:
        return
    notifier.look()
    if report.get("outcome") == "waits for approval":
        notifier.waits(str(report["candidate"]), str(report["reason"]))
    until = time.time()
    used = opened.reports.usage(since=until - _ADVICE_S, until=until)
    advice = insights.make_report(used, lambda _: None, max_loss=settings.max_loss)
    notifier.advise(advice.verdict, advice.reasons)
