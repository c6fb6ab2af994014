"""The conversation of a trajectory, and the rows of training files that are made from it. Pure.

`chat` is OpenAI's fine-tuning format. The other formats are those of TRL: `sft` (conversational, or prompt and
completion), `preference` and `grpo`. Every function raises `Unusable` with the reason if it can make no row.

The store keeps messages unchanged, with every key that a client added. Fine-tuning services refuse unknown keys, and
many chat templates fail on `null`. So `openai_message` and `trl_message` remove such keys when messages are exported.

A correction is the right answer that a person gave for a call that the model answered wrongly. The exported
conversation ends with the correction, and only the correction is to be learned: the later messages of the run followed
from the wrong answer, and its earlier answers may have caused it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, cast

from art_patch.trajectories import KEPT_BY_PROVIDER, canonical, chosen_choice, main_call, number_tool_calls, transcript
from art_patch.types import JSON, Call, Choice, Correction, Group, Trajectory

_OPENAI_KEYS = ("role", "content", "name", "refusal", "tool_calls", "tool_call_id", "weight")
_TRL_KEYS = ("role", "name", "tool_call_id", "reasoning_content")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_HASHED_MEDIA = re.compile(r"sha256:[0-9a-f]{64};bytes=\d+")
_SURROGATES = re.compile(r"[\ud800-\udfff]")


class Unusable(Exception):
    """No row can be made from a trajectory. Equal reasons have equal messages, so that callers can count them."""


@dataclass(frozen=True, slots=True)
class Run:
    """A trajectory as one conversation: the `prompt` of the first request, and the `rest`, all later messages."""

    prompt: tuple[JSON, ...]
    rest: tuple[JSON, ...]
    tools: tuple[JSON, ...]  # that the final call offered to the model
    params: JSON  # the sampling parameters of the final call
    cut: bool  # whether the final answer is incomplete

    @property
    def messages(self) -> tuple[JSON, ...]:
        """All messages of the conversation: `prompt` and `rest`."""
        return self.prompt + self.rest


def run_of(trajectory: Trajectory) -> Run:
    """Return the main conversation of a trajectory; `Unusable` if it was not recorded whole, or is no chat."""
    call = main_call(trajectory)  # its messages hold the whole conversation
    if call is None or not call.messages:
        raise Unusable("no call was recorded")
    if call.api == "completions":
        raise Unusable("a completion is not a chat")
    # The Responses API can keep earlier turns at the provider; what was sent is then not the whole prompt.
    if not KEPT_BY_PROVIDER.isdisjoint(call.params):
        raise Unusable("the provider holds a part of the prompt")
    messages = transcript(trajectory)
    # `rest` begins where the first call was answered, so all later turns are part of it.
    asked = len(_first_prompt(trajectory.calls, messages))
    answer = chosen_choice(call, ())
    cut = call.status != "ok" or (answer is not None and answer.finish_reason in (None, "length"))
    return Run(messages[:asked], messages[asked:], call.tools, call.params, cut)


def answered(run: Run) -> Run:
    """Return the run unchanged if it ends with an answer of the model; else raise `Unusable`."""
    if not run.rest or run.rest[-1].get("role") != "assistant":
        raise Unusable("it ends without an answer")
    return run


def _first_prompt(calls: Sequence[Call], messages: Sequence[JSON]) -> Sequence[JSON]:
    """Return the prompt of the earliest call whose messages begin the conversation."""
    # Not simply all messages before the first answer: apps put example answers into their prompts. Canonical forms,
    # because clients send an answer back with nulls, or with keys in another order.
    whole = [canonical(message) for message in messages]
    for call in calls:
        prompt = [canonical(message) for message in call.messages]
        if prompt and prompt == whole[: len(prompt)]:
            return call.messages
    return messages


def same_prompt(one: Run, other: Run) -> bool:
    """Return whether two runs have the same prompt and tools, apart from the random ids of tool calls."""

    def key(run: Run) -> list[bytes]:
        return [canonical(message) for message in (*number_tool_calls(run.prompt), *run.tools)]

    return key(one) == key(other)


def openai_message(message: JSON) -> dict[str, Any]:
    """Return a message with only the keys of OpenAI's fine-tuning format, without nulls; tool arguments as JSON text.

    It is `Unusable` if it is an empty answer, or holds media of which the store has only the hash.
    """
    clean = {key: message[key] for key in _OPENAI_KEYS if message.get(key) is not None}
    _check_role(clean.get("role"))
    if clean["role"] != "assistant":
        clean.setdefault("content", "")  # only an answer may be without content
    if calls := clean.pop("tool_calls", None):
        clean["tool_calls"] = [without_nulls(call) for call in calls]
    if clean["role"] == "assistant" and not (clean.get("content") or calls or clean.get("refusal")):
        raise Unusable("an answer is empty")
    # Only a part of a content can be media. A plain text that looks like such a hash was written by a person.
    if not isinstance(content := clean.get("content"), str | None) and _HASHED_MEDIA.search(json.dumps(content)):
        raise Unusable("an image, audio or file was recorded as its hash only")
    return clean


def trl_message(message: JSON) -> dict[str, Any]:
    """Return a message for the chat templates of open models: the content as one text, tool arguments as objects.

    It is `Unusable` if it is an empty answer, or holds an image, audio or file.
    """
    clean = {key: message[key] for key in _TRL_KEYS if message.get(key) is not None}
    _check_role(clean.get("role"))
    if clean["role"] == "developer":
        clean["role"] = "system"
    content, calls = _text(message.get("content")), message.get("tool_calls") or ()
    if clean["role"] == "assistant" and not (content or calls):
        # Chat templates have no refusals. To the model, a refusal is the text of its answer.
        content = message.get("refusal") or ""
        if not content:
            raise Unusable("an answer is empty")
    # Never null, because templates concatenate the content with strings.
    shown: dict[str, Any] = {"role": clean.pop("role"), "content": content, **clean}
    if calls:
        shown["tool_calls"] = [_call_with_object(call) for call in calls]
    return shown


def without_nulls(value: Any) -> Any:
    """Return an object without the nulls that some clients add; what is in lists stays as it is."""
    if not isinstance(value, Mapping):
        return value
    return {key: without_nulls(item) for key, item in cast("JSON", value).items() if item is not None}


def writable(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as valid JSON: U+FFFD replaces unpaired surrogates; NaN and infinite numbers are `Unusable`."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise Unusable("it holds a number that JSON does not have (NaN or infinite)") from None
    # Found by the text: half a pair may stand anywhere in the row.
    return json.loads(_SURROGATES.sub("\ufffd", text)) if _SURROGATES.search(text) else row


def _check_role(role: Any) -> None:
    if role not in _ROLES:
        raise Unusable("a message has a role that no format knows")


def _call_with_object(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise Unusable("a tool call is not a function's")
    clean = without_nulls(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        # Text that is no JSON object stays text, because the model wrote it so.
        arguments = parsed if isinstance(parsed, dict) else arguments
    return clean | {"function": {"name": function.get("name"), "arguments": arguments}}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for part in content if isinstance(content, Sequence) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind in ("text", "input_text", "output_text") else None
        if not isinstance(text, str):
            raise Unusable("it holds an image, audio or file")
        parts.append(text)
    return "\n".join(parts)


def corrected(trajectory: Trajectory, corrections: Sequence[Correction]) -> Trajectory:
    """Return the run cut after the call of its newest correction, if any, with the correction as that call's answer."""
    if not corrections:
        return trajectory
    call, correction = _newest(trajectory, corrections)
    finish = "tool_calls" if correction.message.get("tool_calls") else "stop"
    # Without tokens: no policy sampled this answer, so GRPO must not train on it.
    answer = Choice(0, correction.message, finish)
    return replace(trajectory, calls=(replace(call, choices=(answer,), status="ok", error=None),))


def right_and_wrong(trajectory: Trajectory, corrections: Sequence[Correction]) -> tuple[Trajectory, JSON]:
    """Return the corrected run, and the wrong message that the model gave for the corrected call."""
    call, correction = _newest(trajectory, corrections)
    given = chosen_choice(call, trajectory.calls[trajectory.calls.index(call) + 1 :])
    if given is None:
        raise Unusable("the call that was corrected has no answer")
    if canonical(given.message) == canonical(correction.message):
        raise Unusable("the correction is what was answered")
    return corrected(trajectory, corrections), given.message


def _newest(trajectory: Trajectory, corrections: Sequence[Correction]) -> tuple[Call, Correction]:
    # A later correction replaces an earlier one, as a person changes their mind.
    correction = max(corrections, key=lambda each: each.at)
    call = next((each for each in trajectory.calls if each.id == correction.call_id), None)
    if correction.call_id is None:
        call = main_call(trajectory)
    if call is None:
        raise Unusable("the call that was corrected is not there")
    return call, correction


Row = dict[str, Any]


def chat_row(trajectory: Trajectory) -> Row:
    """Return a row of an OpenAI fine-tuning file that holds the complete conversation of a run."""
    run = answered(run_of(trajectory))
    row: Row = {"messages": [openai_message(message) for message in run.messages]} | _tools(run.tools)
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
        if better - worse > margin and same_prompt(chosen, rejected):
            found += 1
            row: Row = {"prompt": _trl(chosen.prompt), "chosen": _trl(chosen.rest), "rejected": _trl(rejected.rest)}
            row |= _tools(chosen.tools) | {"score_chosen": better, "score_rejected": worse}
            yield writable(row | {"scenario_key": group.scenario_key, "group_id": group.id})
    if not found:
        raise Unusable("no two siblings with the same prompt and different rewards")


def correction_row(trajectory: Trajectory, corrections: Sequence[Correction]) -> Row:
    """Return a preference row, without scores: the newest correction is chosen, the model's own answer is rejected."""
    # Of the wrong answer one message only: the messages after it followed from it.
    right, wrong = right_and_wrong(trajectory, corrections)
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
    return {"tools": [without_nulls(tool) for tool in tools]} if tools else {}
