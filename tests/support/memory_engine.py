"""An engine in memory that serves what it is told to."""

from __future__ import annotations

from typing import Any

from art_patch.errors import EngineError


class Engine:
    """Serves what it is told to; `broken` cannot be loaded."""

    def __init__(self, *served: str, broken: str = "") -> None:
        self.served, self.broken = ["agent@0", *served], broken

    def health(self) -> bool:
        return True

    def wait_ready(self, timeout_s: float) -> None:
        """It is."""

    def models(self) -> list[str]:
        return self.served

    def load(self, name: str) -> None:
        if name == self.broken:
            raise EngineError(f"{name} is broken")
        self.served = [*self.served, name]

    def unload(self, name: str) -> None:
        if name not in self.served:
            raise EngineError(f"{name} is not served")
        self.served = [one for one in self.served if one != name]

    def chat(self, **body: Any) -> dict[str, Any]:
        return {"model": body["model"], "choices": [{"logprobs": {"content": [{"logprob": -0.5}]}}]}
