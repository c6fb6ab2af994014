"""Makes rows of training files from trajectories and groups. Pure.

`chat` is OpenAI's fine-tuning format. The other formats are those of TRL: `sft` (conversational, or prompt and
completion), `preference` and `grpo`. Every function raises `Unusable` with the reason if it can make no row.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from art_patch.formats import conversation
from art_patch.formats.conversation import Run, Unusable, answered, run_of, writable
from art_patch.trajectories import chosen_choice
from art_patch.types import JSON, Correction, Group, Trajectory

Row = dict[str, Any]


def chat_row(trajectory: Trajectory) -> Row:
    """Return a row of an OpenAI fine-tuning file that holds the complete conversation of a run."""
    run = answered(run_of(trajectory))
    row: Row = {"messages": [conversation.openai_message(message) for message in run.messages]} | _tools(run.tools)
    # Without tools the key has no meaning.
    if run.tools and isinstance(parallel := run.params.get("parallel_tool_calls"), bool):
        row["parallel_tool_calls"] = parallel
    return writable(row)


def sft_row(trajectory: Trajectory) -> Row:
    """Return a row for TRL's SFT trainer that holds the complete conversation of a run."""
    run = answered(run_of(trajectory))
    if run.cut:
        raise Unusable("the last answer was cut")
    return writable({"messages": _trl(run.messages)} | _tools(run.tools))


def sft_prompt_rows(trajectory: Trajectory) -> list[Row]:
    """Return a row for TRL's SFT trainer for each answered call: the prompt that the model got, and its answer."""
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
    """Yield rows for TRL's preference trainers: a better and a worse answer to the same prompt.

    Args:
        rewards_G: the rewards of the G siblings; `None` for a sibling that is not scored.
        all_pairs: yield every pair of siblings with the same prompt, not only the best and the worst of each prompt.
        margin: pairs whose rewards differ by this much or less are left out.
    """
    siblings = zip(rewards_G, map(_usable, group.trajectories), strict=True)
    runs = [(reward, run) for reward, run in siblings if reward is not None and run is not None]
    if len(runs) < 2:
        raise Unusable("fewer than two siblings have both a reward and an answer")
    # The sort is stable, so equal rewards give the same pairs in every export.
    runs.sort(key=lambda pair: pair[0], reverse=True)
    found = 0
    for (better, chosen), (worse, rejected) in combinations(runs, 2) if all_pairs else _extremes(runs):
        # Prompts of siblings may differ, for instance in a date. Such a pair would teach the date.
        if better - worse > margin and conversation.same_prompt(chosen, rejected):
            found += 1
            row: Row = {"prompt": _trl(chosen.prompt), "chosen": _trl(chosen.rest), "rejected": _trl(rejected.rest)}
            row |= _tools(chosen.tools) | {"score_chosen": better, "score_rejected": worse}
            yield writable(row | {"scenario_key": group.scenario_key, "group_id": group.id})
    if not found:
        raise Unusable("no two siblings with the same prompt and different rewards")


def correction_row(trajectory: Trajectory, corrections: Sequence[Correction]) -> Row:
    """Return a preference row, without scores: the newest correction is chosen, the model's own answer is rejected."""
    # Of the wrong answer one message only: the messages after it followed from it.
    right, wrong = conversation.right_and_wrong(trajectory, corrections)
    run = answered(run_of(right))
    row: Row = {"prompt": _trl(run.prompt), "chosen": _trl(run.rest), "rejected": _trl([wrong])}
    row |= _tools(run.tools) | {"score_chosen": None, "score_rejected": None}
    return writable(row | {"scenario_key": trajectory.info.scenario_key, "group_id": None})


def grpo_row(trajectory: Trajectory, *, group: Group | None = None, rewards_G: Sequence[float | None] = ()) -> Row:
    """Return a row for TRL's GRPO trainer: a prompt to sample from, and mean and best reward of the recorded answers.

    With `group`, the row stands for all siblings; `rewards_G` has `None` for a sibling that is not scored.
    """
    run = run_of(trajectory)
    if run.prompt[-1].get("role") == "assistant":
        raise Unusable("the prompt ends with an answer")
    # Siblings without a reward count in `siblings` and in no reward: they were not judged, which is not zero.
    given = [reward for reward in rewards_G if reward is not None]
    row: Row = {
        "prompt": _trl(run.prompt),
        **_tools(run.tools),
        "scenario_key": group.scenario_key if group else trajectory.info.scenario_key,
        "group_id": group.id if group else None,
        "reward": sum(given) / len(given) if given else None,
        "best_reward": max(given, default=None),
        "siblings": len(group.trajectories) if group else 1,
    }
    return writable(row)


def _extremes(runs: Sequence[tuple[float, Run]]) -> Iterator[tuple[tuple[float, Run], tuple[float, Run]]]:
    """Yield the best and the worst run of each prompt in the group; `runs` come best first."""
    left = list(runs)
    while len(left) > 1:
        best = left[0]
        same = [pair for pair in left if conversation.same_prompt(best[1], pair[1])]
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
    return [conversation.trl_message(message) for message in messages]


def _tools(tools: Sequence[JSON]) -> Row:
    return {"tools": [conversation.without_nulls(tool) for tool in tools]} if tools else {}
