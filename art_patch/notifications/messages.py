"""Puts decisions into words. In: changes of policies' states, as the ledger has them. Out: messages, or none. Pure."""

from dataclasses import dataclass
from typing import Literal

from art_patch._lib.words import one_line
from art_patch.types import JSON

Kind = Literal["promotion", "rejection", "rollback", "alarm", "advice", "approval", "test"]


@dataclass(frozen=True, slots=True)
class Message:
    """A message: what happened in a line, and why."""

    kind: Kind
    title: str
    body: str


def of_move(project: str, move: JSON) -> Message | None:
    """Return the message about a change of a policy's state; `None` if it is not worth one."""
    name, before, after = move["policy"], move["from_state"], move["to_state"]
    if after == "champion":
        # One is gone back to without a test.
        goes_back = move["again"] and before in ("retired", "learner")
        kind: Kind = "rollback" if goes_back else "promotion"
        what = f"{name} serves again" if goes_back else f"{name} was promoted and serves"
    elif after == "rejected":
        kind, what = "rejection", f"{name} was rejected"
    elif before == "champion" and not str(move["reason"]).startswith("replaced by "):
        # Proven worse than the control group; else by a person.
        is_alarm = bool(move["metrics"].get("control"))
        kind, what = ("alarm" if is_alarm else "rollback"), f"{name} serves no more, upstream answers"
    else:
        return None
    was = f"It was {before} before.\n" if before not in (None, "champion") else ""
    return Message(kind, _title(project, what), f"{one_line(move['reason'])}\n{was}Decided by {one_line(move['who'])}.")


def of_advice(project: str, reasons: tuple[str, ...]) -> Message:
    """Return the message that the report advises against the champion."""
    what = "do not switch: upstream is the better choice now"
    return Message("advice", _title(project, what), "\n".join([*map(one_line, reasons), "See `art-patch report`."]))


def of_approval(project: str, candidate: str, reason: str) -> Message:
    """Return the message that a candidate waits for a person."""
    return Message("approval", _title(project, f"{candidate} waits for approval"), one_line(reason))


def of_test(project: str) -> Message:
    """Return the message by which a person tries the addresses."""
    body = 'Promotions, rejections, rollbacks, alarms, approvals to give, and "do not switch" come here.'
    return Message("test", _title(project, "this is a test"), body)


def _title(project: str, what: str) -> str:
    return f"art_patch {project}: {what}"
