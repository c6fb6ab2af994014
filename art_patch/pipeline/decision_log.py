"""Writes the decisions on policies, and changes of the route, into the log of a server or job, whoever made them."""

from art_patch._lib.events import event, route_turned
from art_patch.store import Ledger
from art_patch.types import JSON

_MOST = 100  # decisions between two looks
_EVENTS = {"champion": "promotion", "rejected": "rejection"}


class DecisionLog:
    """Remembers what was logged. A new one begins with what is decided after it was made."""

    def __init__(self, ledger: Ledger) -> None:
        """Look at the ledger for the first time."""
        self._ledger, self._route = ledger, ledger.route()
        self._seen: int = next((move["id"] for move in ledger.history(limit=1)), 0)

    def look(self) -> None:
        """Log what was decided since the last look, a line each; a store out of reach raises its errors."""
        route, moves = self._ledger.route(), self._ledger.history(limit=_MOST)
        for move in reversed([move for move in moves if move["id"] > self._seen]):
            self._seen = move["id"]
            _log_move(move)
        route_turned(self._route, route)
        self._route = route


def _log_move(move: JSON) -> None:
    kind = _EVENTS.get(move["to_state"], "decision")
    if kind == "promotion" and move["from_state"] == "retired":
        kind = "rollback"
    names = {name: move[name] for name in ("policy", "from_state", "to_state", "who", "reason", "at")}
    event(
        "decisions", "%s: %s is %s now, it was %s, by %s: %s", kind, move["policy"], move["to_state"],
        move["from_state"] or "new", move["who"], move["reason"], event=kind, **names,
    )  # fmt: skip
