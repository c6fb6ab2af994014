"""Files of the spool as dead processes leave them, and a store that refuses what a test names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art_patch.errors import StoreError
from art_patch.recording import Exchange
from art_patch.recording.spool import create
from art_patch.settings import Settings
from art_patch.types import Record


class Nowhere:
    """A queue for calls that are never queued, and a store that keeps records in a list."""

    generation = 0

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.refused: set[str] = set()
        self.down = False

    def put(self, item: Exchange, size: int) -> bool:
        return True

    def write(self, records: Sequence[Record]) -> None:
        error = StoreError("no")
        error.may_pass = self.down
        if self.down or self.refused & {record.id for record in records}:
            raise error
        self.records += records


def asked(request: dict[str, Any], answer: bytes = b"{}", api: str = "chat", **facts: Any) -> Exchange:
    made = Exchange(Nowhere(), "m")
    made.request, made.answer, made.api = json.dumps(request).encode(), [answer], api  # pyright: ignore
    for name, value in facts.items():
        setattr(made, name, value)
    made.finish(facts.get("ended", "complete"))
    return made


def left(settings: Settings, *bodies: bytes, rate: float = 1.0) -> Path:
    """A file as a process leaves it that is killed."""
    file = create(settings, json.dumps({"sample_rate": rate}).encode())
    file.append(bodies)
    file.let_go()
    return file.path


def question(text: str, name: str = "first") -> dict[str, Any]:
    return {"model": name, "messages": [{"role": "user", "content": text}]}


ANSWER = json.dumps({"choices": [{"message": {"role": "assistant", "content": "it is"}}]}).encode()
