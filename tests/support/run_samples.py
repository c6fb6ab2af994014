"""A store with two scored groups of a tool-using agent, an upstream call and a failure."""

from __future__ import annotations

import json
from typing import Any

from art_patch.store import Store
from art_patch.types import Call, Choice, Group, Score, SpanInfo, Trajectory, TrajectoryInfo

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up an item",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
SYSTEM = {"role": "system", "content": "You sell fruit. Be brief."}
REWARDS = (0.8, 0.1, 0.95)


def asked(item: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is a {item}?"}


def choice(message: dict[str, Any], tokens: int = 3, finish: str | None = "stop", index: int = 0) -> Choice:
    return Choice(index, message, finish, tuple(range(tokens)), (-0.5,) * tokens)


def tool_run(key: str, item: str, answer: str, *, started_at: float = 1_000.0, **about: Any) -> Trajectory:
    """Two calls: look it up, answer."""
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{key}", "type": "function", "function": {"name": "lookup", "arguments": json.dumps({"item": item})}}  # noqa: E501
        ],
    }  # fmt: skip
    result = {"role": "tool", "tool_call_id": f"call_{key}", "content": "31 cents"}
    common: dict[str, Any] = {
        "trajectory_id": key,
        "requested_model": "gpt-5-mini",
        "tools": (TOOL,),
        "policy": "agent@1",
        "prompt_token_ids": (5, 6, 7),
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "duration_ms": 500.0,
        "params": {"temperature": 1.0, "parallel_tool_calls": False},
    }
    prompt = (SYSTEM, asked(item))
    first = Call(
        f"{key}-1", started_at=started_at, messages=prompt, choices=(choice(called, 3, "tool_calls"),), **common
    )
    second = Call(
        f"{key}-2",
        started_at=started_at + 1,
        messages=(*prompt, called, result),
        choices=(choice({"role": "assistant", "content": answer}),),
        **common,
    )
    return Trajectory(TrajectoryInfo(key, started_at, "explicit", **about), (first, second))


def plain_run(key: str, *messages: str, started_at: float = 1_000.0, **about: Any) -> Trajectory:
    """One upstream call: users and assistants by turns, the last one answers."""
    turns = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(messages)]
    call = Call(
        f"{key}-1",
        key,
        started_at,
        "gpt-5-mini",
        tuple(turns[:-1]),
        (Choice(0, turns[-1], "stop"),),
        untrainable="answered by upstream",
    )
    return Trajectory(TrajectoryInfo(key, started_at, **about), (call,))


def write(store: Store, *trajectories: Trajectory) -> None:
    for trajectory in trajectories:
        store.write([trajectory.info, *trajectory.calls, *trajectory.scores])


def fill(store: Store) -> None:
    """Write it all: `a0..a2` and `b0..b2` grouped and scored, `plain` from upstream, `failed` without an answer."""
    for number, (group, item) in enumerate((("group-a", "plum"), ("group-b", "pear"))):
        letter = group[-1]
        runs = [
            tool_run(
                f"{letter}{index}",
                item,
                f"{item} {index}",
                started_at=1_000.0 + 100 * number + 10 * index,
                user_id=f"user-{letter}",
                session_id=f"session-{index}",
                scenario_key=item,
                tags=("Web", "é") if index else (),
                name="fruit",
            )
            for index in range(3)
        ]
        write(store, *runs)
        store.write([SpanInfo(f"{letter}-span", f"{letter}0", "answer", 1_000.0, ended_at=1_002.0)])
        store.ledger.add_groups([Group(group, f"scenario:{item}", "scenario_key", tuple(runs))], now=1_300.0)
        source = ("user", "ruler")[number]
        store.write(
            [
                Score(
                    f"{letter}{index}-score", f"{letter}{index}", "reward" if source == "user" else "ruler", value, source,  # noqa: E501
                    1_300.0, comment="brief", group_id=group,
                )
                for index, value in enumerate(REWARDS)
            ]
        )  # fmt: skip
    store.ledger.set_groups(["group-a", "group-b"], "scored")
    write(store, plain_run("plain", "hi", "hello", "bye", "see you", started_at=2_000.0, user_id="user-p"))
    failed = Call("f-1", "failed", 3_000.0, "gpt-5", (asked("fig"),), status="error", error="APITimeoutError",
                  untrainable="answered by upstream")  # fmt: skip
    store.write([TrajectoryInfo("failed", 3_000.0, error="ValueError: no"), failed])
    shadow = Call("s-1", "shadow", 2_500.0, "gpt-5", (asked("fig"),), (choice({"role": "assistant", "content": "s"}),),
                  policy="agent@1", prompt_token_ids=(1,), shadow_of="plain-1")  # fmt: skip
    store.write([TrajectoryInfo("shadow", 2_500.0, "shadow"), shadow, TrajectoryInfo("opened", 2_600.0, "explicit")])
