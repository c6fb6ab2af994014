"""Options that choose trajectories, the same for every command that has them."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

if TYPE_CHECKING:
    from art_patch.store import Filter

_PANEL = "Which trajectories"
_UNITS = {"m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


def _option(name: str, help: str) -> Any:
    return typer.Option(name, help=help, show_default=False, rich_help_panel=_PANEL)


UserOption = Annotated[str | None, _option("--user", "Of this user.")]
SessionOption = Annotated[str | None, _option("--session", "Of this session.")]
ScenarioOption = Annotated[str | None, _option("--scenario", "On this task.")]
GroupOption = Annotated[str | None, _option("--group", "In this group: its id, or the key given to `group()`.")]
TagOption = Annotated[str | None, _option("--tag", "With this tag.")]
NameOption = Annotated[str | None, _option("--name", "Of this name.")]
OriginOption = Annotated[
    str | None, _option("--origin", "explicit, otel, stitched, single, imported, or shadow: left out unless asked for.")
]
PolicyOption = Annotated[str | None, _option("--policy", "Answered by NAME@STEP, or by `upstream`.")]
SinceOption = Annotated[str | None, _option("--since", "Last call at or after: 2026-11-21, 2026-11-21T14:00, 7d, 12h.")]
UntilOption = Annotated[str | None, _option("--until", "Last call before.")]
MinRewardOption = Annotated[float | None, _option("--min-reward", "Judged at least so good.")]
MaxRewardOption = Annotated[float | None, _option("--max-reward", "Judged at most so good.")]
StatusOption = Annotated[str | None, _option("--status", "ok, or error: the block or one of its calls failed.")]
TrainableOption = Annotated[
    bool | None,
    typer.Option("--trainable/--not-trainable", help="With a call that can be trained on.", rich_help_panel=_PANEL),
]


def make_filter(*, shadows: bool = False, now: float | None = None, **given: Any) -> Filter:
    """Return the filter that the options ask for.

    Args:
        shadows: take shadow calls, too.
        now: seconds since the epoch.
        given: the options, by the names of the filter's fields; times as the user wrote them.

    Raises:
        ConfigError: if one of them says something impossible.
    """
    from art_patch.errors import ConfigError
    from art_patch.store import Filter
    from art_patch.types import Origin

    at = time.time() if now is None else now
    for name in ("since", "until"):
        if given.get(name) is not None:
            given[name] = _moment(given[name], f"--{name}", at)
    if None not in (given.get("since"), given.get("until")) and given["since"] >= given["until"]:
        raise ConfigError("--since is not before --until, so nothing can match")
    for name, known in (("origin", get_args(Origin)), ("status", ("ok", "error"))):
        if given.get(name) is not None and given[name] not in known:
            raise ConfigError(f"--{name} {given[name]!r} is not one of {', '.join(known)}")
    policy = given.get("policy")
    if policy is not None and policy != "upstream" and not re.fullmatch(r".+@\d+", policy):
        raise ConfigError(f"--policy {policy!r} is neither NAME@STEP nor upstream")
    return Filter(shadows=shadows, **given)


def chosen(filter: Filter) -> dict[str, Any]:
    """Return what the user chose, by name."""
    from dataclasses import asdict

    return {name: value for name, value in asdict(filter).items() if value is not None and name != "shadows"}


def _moment(text: str, option: str, now: float) -> float:
    """`7d` is a week ago; a date without a zone is this machine's."""
    from art_patch.errors import ConfigError

    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip()):
        return now - float(found[1]) * _UNITS[found[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        why = f"{option} {text!r} is neither a date such as 2026-11-21 nor an age such as 7d or 12h"
        raise ConfigError(why) from None
