"""Writes the decisions on policies, and changes of the route, into the log of a server or job, whoever made them."""

from art_patch._lib.events import event, route_turned
from art_patch.store import Ledger
from art_patch.types import JSON

_AT_ONCE = 100  # decisions that a look reads first
_EVENTS = {"champion": "promotion", "rejected": "rejection"}


class DecisionLog:
    """Remembers what was logged. A new one begins with what is decided after it was made.

    If the store was put back from a backup meanwhile, numbers of decisions begin again at a lower one. What was decided
    after the newest decision that was seen is then logged by its time.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Look at the ledger for the first time."""
        self._ledger, self._route = ledger, ledger.route()
        self._seen: JSON = next(iter(ledger.history(limit=1)), {"id": 0, "at": 0.0})

    def look(self) -> None:
        """Log what was decided since the last look, a line each; a store out of reach raises its errors."""
        route, new = self._ledger.route(), self._new()
        for move in reversed(new):
            # One is gone back to without a test.
            again = move["to_state"] == "champion" and move["from_state"] in ("retired", "learner")
            earlier = self._ledger.history(limit=None, policy=move["policy"]) if again else []
            again = any(each["to_state"] == "champion" and each["id"] < move["id"] for each in earlier)
            self._seen = move
            _log_move("rollback" if again else _EVENTS.get(move["to_state"], "decision"), move)
        route_turned(self._route, route)
        self._route = route

    def _new(self) -> list[JSON]:
        most = _AT_ONCE
        while True:
            moves = self._ledger.history(limit=most)
            if len(moves) < most or moves[-1]["id"] <= self._seen["id"]:
                break
            most *= 10
        seen, is_seen = self._seen, any(all(move[key] == self._seen[key] for key in ("id", "at")) for move in moves)
        if is_seen or not seen["id"]:
            return [move for move in moves if move["id"] > seen["id"]]
        self._seen = moves[0] if moves else {"id": 0, "at": seen["at"]}
        return [move for move in moves if move["at"] > seen["at"]]


def _log_move(kind: str, move: JSON) -> None:
    names = {name: move[name] for name in ("policy", "from_state", "to_state", "who", "reason", "at")}
    event(
        "decisions", "%s: %s is %s now, it was %s, by %s: %s", kind, move["policy"], move["to_state"],
        move["from_state"] or "new", move["who"], move["reason"], event=kind, **names,
    )  # fmt: skip
