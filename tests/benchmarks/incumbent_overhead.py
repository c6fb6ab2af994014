"""What the control group and the learner add to a call on the app's thread, in microseconds.

A call that begins asks where it goes. It is begun over and over, with the targets in turns, so that what else the
machine does hits all alike; nothing is sent. A routed call with a control group is compared with a routed one without,
and a call beside a learner, or beside a canary of upstream's, with one that is recorded only. Each with a named session
and without one, where the opening messages (here 4 KiB of system prompt) take the session's place.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

ROUNDS = 4_000
_BLOCK = 20


def overhead(rounds: int = ROUNDS) -> Mapping[str, float]:
    """Return name -> microseconds added to the begin of a call, median."""
    os.environ["ART_PATCH_HOME"] = tempfile.mkdtemp(prefix="incumbent-")
    import openai
    from openai._models import FinalRequestOptions

    import art_patch as art
    from art_patch.patching import control
    from art_patch.patching.routing.routed_call import begin
    from art_patch.patching.routing.target import Target
    from art_patch.settings import load_settings

    runtime = control.start(load_settings(project="overhead", poll_interval_s=2.0))
    client = openai.OpenAI(api_key="k", base_url="http://127.0.0.1:9/v1")
    prompt = [{"role": "system", "content": "You answer questions of customers. " * 120}]
    body = {"model": "gpt-x", "messages": [*prompt, {"role": "user", "content": "Where is my order?"}]}
    options = FinalRequestOptions.construct(method="post", url="/chat/completions", json_data=body)
    bare = Target("route", None, "http://127.0.0.1:9/v1")
    routed = replace(bare, champion="agent@3")
    tested = {"challenger_state": "canary", "challenger_percent": 5.0}
    targets = {
        "record": bare,
        "route": routed,
        "control": replace(routed, control_percent=5.0),
        "learner": replace(bare, challenger="agent@0", challenger_state="shadow"),
        "canary": replace(bare, challenger="agent@1", **tested),  # type: ignore[arg-type]
    }
    found: dict[str, float] = {}
    for kind in ("named", "unnamed"):
        took = {name: list[float]() for name in targets}
        with art.trajectory("run", session_id="visit 1") if kind == "named" else nullcontext():
            for _ in range(rounds // _BLOCK):
                for name, target in targets.items():
                    runtime.target = target
                    for _ in range(_BLOCK):
                        began = time.perf_counter()
                        begin(runtime, client, options, False, False)
                        took[name].append(time.perf_counter() - began)
        p50 = {name: 1e6 * median(times) for name, times in took.items()}
        found[f"control_added_us_{kind}"] = p50["control"] - p50["route"]
        found[f"learner_added_us_{kind}"] = p50["learner"] - p50["record"]
        found[f"canary_added_us_{kind}"] = p50["canary"] - p50["record"]
    control.unpatch()
    return {name: round(value, 2) for name, value in found.items()}


if __name__ == "__main__":
    print(overhead())
