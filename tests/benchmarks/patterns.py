"""How long hostile texts stop the app: how long another thread waits for the interpreter.

::

    python tests/benchmarks/patterns.py [--json]

`longest_hold_ms`: 10 kB of each hostile text, and 1 MB of the worst of them, go through each search for secrets and
media that runs in the app's process. Between two steps of Python another thread gets the interpreter when it asks. It
waits only for a call into C, so the longest of those is the hold. It is measured in CPU time, so that a busy machine
changes little. Of two runs the best counts. `cpu_s_per_mb`: CPU time of the worst of the texts. `texts`: number of
them. Three minutes.
"""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from art_patch.recording import scrubbing
from art_patch.recording.redaction import without_media
from art_patch.recording.scrubbing import hide, scrub
from tests.support.benchmark_report import Target, finish, say
from tests.support.hostile_texts import HostileText, hostile_texts

_WORST = 5

TARGETS = (Target("longest_hold_ms", None, 5, "1 MB of each hostile text: longest hold of the interpreter"),)


def hold_and_cpu_s(do: Callable[[Any], Any], text: Any) -> tuple[float, float]:
    """Return the longest call into C and the CPU time of `do(text)`, measured in a run each."""
    began = time.thread_time()
    do(text)
    spent = time.thread_time() - began
    longest, begun = 0.0, 0.0

    def note(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal longest, begun
        if event == "c_call":
            begun = time.thread_time()
        elif event in ("c_return", "c_exception"):
            longest = max(longest, time.thread_time() - begun)

    sys.setprofile(note)
    try:
        do(text)
    finally:
        sys.setprofile(None)
    return longest, spent


def main() -> None:
    """Measure and report."""
    found = (rule[:2] + rule[4:] for rule in scrubbing._RULES)
    patterns = [re.compile(each) for several in found for each in several if each]
    texts = list(dict.fromkeys(text for pattern in patterns for text in hostile_texts(pattern)))
    gc.disable()
    worst: dict[str, tuple[float, float]] = {}
    for do in (hide, scrub, without_media):

        def measured(text: HostileText, size: int, do: Callable[[Any], Any] = do) -> tuple[float, float]:
            given = text.of_size(size)
            quoted = f'{{"data": "{given}"}}'.encode("utf-8", "surrogatepass")
            return hold_and_cpu_s(do, quoted if do is without_media else given)

        suspects = dict(
            sorted(((text, measured(text, 10_000)) for text in texts), key=lambda item: -item[1][0])[:_WORST]
        )
        slowest = dict(
            sorted(((text, measured(text, 10_000)) for text in texts), key=lambda item: -item[1][1])[:_WORST]
        )
        for text in suspects | slowest:
            several = [measured(text, 1_000_000) for _ in range(2)]
            worst[f"{do.__name__} {text}"] = (min(hold for hold, _ in several), min(cpu for _, cpu in several))
    ranked = sorted(worst.items(), key=lambda item: -item[1][0])
    for name, (hold, cpu) in ranked[:5]:
        say(f"{hold * 1000:.2f} ms of {cpu * 1000:.0f} ms: {name}")
    metrics = {
        "longest_hold_ms": ranked[0][1][0] * 1000,
        "cpu_s_per_mb": max(cpu for _, cpu in worst.values()),
        "texts": len(texts),
    }
    finish(metrics, TARGETS, as_json="--json" in sys.argv)


if __name__ == "__main__":
    main()
