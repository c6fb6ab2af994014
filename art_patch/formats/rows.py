"""Trajectories and groups to rows of training files. Pure.

`chat` is what OpenAI's fine-tuning takes; the others are TRL's: `sft` (conversational, or prompt and completion),
`preference`, `grpo`. Every function returns its rows or raises `Unusable` with the reason for none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

from art_patch.formats.conversation import (
    Run,
    Unusable,
    answered,
    openai_message,
    openai_tool,
    right_and_wrong,
    run_of,
    same_prompt,
    trl_message,
    writable,
)
from art_patch.trajectories import chosen_choice
from art_patch.types import JSON, Correction, Group, Trajectory

Row = dict[str, Any]
Kind = Literal["json", "json_list", "text", "number", "integer", "boolean"]

COLUMNS: Mapping[str, Mapping[str, Kind]] = {
    "chat": {"messages": "json_list", "tools": "json_list", "parallel_tool_calls": "boolean"},
    "sft": {"messages": "json_list", "tools": "json_list"},
    "sft-prompt": {"prompt": "json_list", "completion": "json_list", "tools": "json_list"},
    "preference": {
        "prompt": "json_list",
        "chosen": "json_list",
        "rejected": "json_list",
        "tools": "json_list",
        "score_chosen": "number",
        "score_rejected": "number",
        "scenario_key": "text",
        "group_id": "text",
    },
    "grpo": {
        "prompt": "json_list",
        "tools": "json_list",
        "scenario_key": "text",
        "group_id": "text",
        "reward": "number",
        "best_reward": "number",
        "siblings": "integer",
    },
    "trajectories": {
        "format": "text",
        "id": "text",
        "started_at": "number",
        "origin": "text",
        "name": "text",
        "user_id": "text",
        "session_id": "text",
        "scenario_key": "text",
        "calls": "integer",
        "record": "json",
    },
}
"""Columns of each format in a Parquet file, in order. Of `trajectories` only `record` is read back."""


def chat_row(trajectory: Trajectory) -> Row:
    """Return one line of an OpenAI fine-tuning file."""
    run = answered(run_of(trajectory))
    row: Row = {"messages": [openai_message(message) for message in run.messages]}
    if run.tools:
        row["tools"] = [openai_tool(tool) for tool in run.tools]
        # The key only has a meaning beside tools.
        if isinstance(run.params.get("parallel_tool_calls"), bool):
            row["parallel_tool_calls"] = run.params["parallel_tool_calls"]
    return writable(row)


def sft_row(trajectory: Trajectory) -> Row:
    """Return one conversation to learn as a whole."""
    run = answered(run_of(trajectory))
    if run.cut:
        raise Unusable("the last answer was cut")
    return writable({"messages": _trl(run.messages)} | _tools(run.tools))


def sft_prompt_rows(trajectory: Trajectory) -> list[Row]:
    """Return a prompt and its answer for each call that was answered, as the model saw them."""
    rows: list[Row] = []
    for position, call in enumerate(trajectory.calls):
        choice = chosen_choice(call, trajectory.calls[position + 1 :])
        # An answer that was cut off teaches to stop in the middle.
        if call.status == "ok" and choice is not None and choice.finish_reason not in (None, "length"):
            row: Row = {"prompt": _trl(call.messages), "completion": _trl([choice.message])}
            rows.append(writable(row | _tools(call.tools)))
    if not rows:
        raise Unusable("no call was answered to the end")
    return rows


def preference_rows(
    group: Group, rewards_G: Sequence[float | None], *, all_pairs: bool = False, margin: float = 0.0
) -> Iterator[Row]:
    """Yield pairs of a better and a worse answer to the same prompt.

    Args:
        group: the siblings to compare.
        rewards_G: the reward of each sibling; `None` where there is none.
        all_pairs: every pair instead of the best against the worst.
        margin: pairs whose rewards differ by this much or less are left out.

    Raises:
        Unusable: if there is no such pair.
    """
    runs: list[tuple[float, Run]] = []
    for trajectory, reward in zip(group.trajectories, rewards_G, strict=True):
        if reward is not None:
            run = _usable(trajectory)
            if run is not None:
                runs.append((reward, run))
    if len(runs) < 2:
        raise Unusable("fewer than two siblings have both a reward and an answer")
    # The sort is stable, so equal rewards give the same pairs in every export.
    runs.sort(key=lambda pair: pair[0], reverse=True)
    found = 0
    for (better, chosen), (worse, rejected) in combinations(runs, 2) if all_pairs else _extremes(runs):
        # Siblings may differ in their prompt, such as in a date; such a pair would teach the date.
        if better - worse > margin and same_prompt(chosen, rejected):
            found += 1
            row: Row = {"prompt": _trl(chosen.prompt), "chosen": _trl(chosen.rest), "rejected": _trl(rejected.rest)}
            row |= _tools(chosen.tools) | {"score_chosen": better, "score_rejected": worse}
            yield writable(row | {"scenario_key": group.scenario_key, "group_id": group.id})
    if not found:
        raise Unusable("no two siblings with the same prompt and different rewards")


def correction_row(trajectory: Trajectory, corrections: Sequence[Correction]) -> Row:
    """Return a pair for `preference`: the answer that a person says is right, and the answer that was given.

    Their scores are null, because no one scored them.
    """
    # The wrong answer stands alone: messages after it followed from it.
    right, wrong = right_and_wrong(trajectory, corrections)
    run = answered(run_of(right))
    row: Row = {"prompt": _trl(run.prompt), "chosen": _trl(run.rest), "rejected": _trl([wrong])}
    row |= _tools(run.tools) | {"score_chosen": None, "score_rejected": None}
    return writable(row | {"scenario_key": trajectory.info.scenario_key, "group_id": None})


def grpo_row(trajectory: Trajectory, *, group: Group | None = None, rewards_G: Sequence[float | None] = ()) -> Row:
    """Return a prompt to sample from, and the rewards of the recorded answers to it.

    Args:
        trajectory: the run with the prompt.
        group: its siblings, which the row stands for, if it was grouped.
        rewards_G: the reward of each sibling.
    """
    run = run_of(trajectory)
    if run.prompt[-1].get("role") == "assistant":
        raise Unusable("the prompt ends with an answer")
    given = [reward for reward in rewards_G if reward is not None]
    return writable(
        {
            "prompt": _trl(run.prompt),
            **_tools(run.tools),
            "scenario_key": group.scenario_key if group else trajectory.info.scenario_key,
            "group_id": group.id if group else None,
            "reward": sum(given) / len(given) if given else None,
            "best_reward": max(given) if given else None,
            "siblings": len(group.trajectories) if group else 1,
        }
    )


def digest(*values: Any) -> bytes:
    """Return 16 bytes that are equal for equal JSON values."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).digest()


def _extremes(runs: Sequence[tuple[float, Run]]) -> Iterator[tuple[tuple[float, Run], tuple[float, Run]]]:
    """Yield the best and the worst run of each prompt in the group."""
    left = list(runs)  # best first
    while len(left) > 1:
        best = left[0]
        same = [pair for pair in left if same_prompt(best[1], pair[1])]
        left = [pair for pair in left if pair not in same]
        if len(same) > 1:
            yield best, same[-1]


def _usable(trajectory: Trajectory) -> Run | None:
    try:
        run = answered(run_of(trajectory))
        _trl(run.messages)
    except Unusable:
        return None
    return run


def _trl(messages: Sequence[JSON]) -> list[dict[str, Any]]:
    return [trl_message(message) for message in messages]


def _tools(tools: Sequence[JSON]) -> Row:
    return {"tools": [openai_tool(tool) for tool in tools]} if tools else {}
