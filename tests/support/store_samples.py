"""Records that the tests of the store write."""

from __future__ import annotations

from art_patch.types import Call, Choice, Policy, TrajectoryInfo

TOOLS = ({"type": "function", "function": {"name": "lookup"}},)


def call(key: str, trajectory: str = "t1", at: float = 1.0, **changes) -> Call:
    values = {
        "id": key,
        "trajectory_id": trajectory,
        "started_at": at,
        "duration_ms": 5.0,
        "ttft_ms": 1.5,
        "requested_model": "gpt-5",
        "policy": "agent@0",
        "messages": ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi \u00e9 \U0001f600"}),
        "tools": TOOLS,
        "params": {"temperature": 0.5, "n": 2},
        "choices": (
            Choice(0, {"role": "assistant", "content": "yo"}, "stop", (1, 2, 4_000_000_000), (-0.5, -1.5, 0.0)),
            Choice(1, {"role": "assistant", "content": "hey"}, "stop", (9,), (-0.25,)),
        ),
        "prompt_token_ids": (5, 6, 7),
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "span_id": "s1",
    }
    return Call(**(values | changes))


def info(key: str = "t1", **changes) -> TrajectoryInfo:
    return TrajectoryInfo(key, 1.0, **changes)


def policy(step: int, state: str = "candidate") -> Policy:
    return Policy(f"agent@{step}", "/base", "ff", state, float(step), path=f"/a/agent@{step}", parent="agent@0")  # type: ignore[arg-type]


WRITER = """
import sys
from art_patch.types import Call, Choice, TrajectoryInfo
from art_patch.store import open_store
store, me = open_store(sys.argv[1]), sys.argv[2]
for batch in range(int(sys.argv[3])):
    t = f"{me}-{batch}"
    calls = [Call(f"{t}-{i}", t, float(batch), "m", ({"role": "user", "content": f"{t} {i}"},),
                  (Choice(0, {"role": "assistant", "content": "ok"}, "stop"),)) for i in range(10)]
    store.write([TrajectoryInfo(t, float(batch)), *calls])
    print(t, flush=True)
"""
"""A process that writes and says what was acknowledged: URL, name, how many batches."""
