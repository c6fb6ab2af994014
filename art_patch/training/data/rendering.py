"""Renders a call's messages to the prompt token ids that an engine would compute, and an answer's text to its ids.

Answers of upstream or of a person have no recorded ids and are rendered here. The prompt is rendered alone, and again
with the answer appended. The answer's ids are the ids that the second rendering adds. This requires that text and ids
of the second rendering begin with those of the first. The learned ids end with the answer's only end-of-turn token; an
answer with two is rejected. The template may write only white space after this token. For an answer without thoughts,
the tokens that the template writes in their place are learned too, such as Qwen 3's empty block.

If the rendering with the answer does not begin with the rendered prompt, two remedies are tried:

- The prompt ends with an opening tag for thoughts, and the template leaves the thoughts out of the answer (DeepSeek
  R1). Then the answer's thoughts (an empty text if it has none) and the closing tag are put after the prompt.
- The prompt states that there are no thoughts (`enable_thinking: false`), but the answer has some. Then the answer is
  rendered without its thoughts.

If no remedy helps, the answer is rejected. A call or answer that cannot be rendered raises `Unusable`. Its text is the
same for the same reason, so that callers can count the reasons.

Each engine prepares messages, tools and arguments for the chat template in its own way:

| part of the request | embedded engine | vLLM 0.32 |
|---|---|---|
| text parts of a content | are joined without a separator | are joined by newlines |
| keys of a message | are all passed on | only known keys are passed on; thoughts are passed under both of their names |
| tool-call arguments that are not a JSON object | are passed on unchanged | are replaced by `{}` |
| role `developer` | becomes `system` | stays if the template knows it; else joined with all `system` messages |
| a tool | is passed on unchanged | known keys in vLLM's order; missing `description` and `parameters` are null |
| tools if `tool_choice` is `none` | are hidden from the template | are shown to the template |

The code of the embedded engine for this is `art_patch.serving.embedded.text`; vLLM's is its `renderers/chat_utils.py`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from art_patch.formats import Unusable
from art_patch.training.data.rows import Turn
from art_patch.training.families import Family, Thinking
from art_patch.types import JSON, Call

Engine = Literal["embedded", "vllm"]
_THOUGHTS = ("reasoning", "reasoning_content")  # keys under which servers put an assistant's thoughts
_TEXTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders calls to token ids as one engine does, with a base model's tokenizer."""

    tokenizer: Any  # a transformers tokenizer that has a chat template
    family: Family  # the base model's family, which names its end-of-turn tokens and thinking tags
    engine: Engine = "embedded"  # the engine whose preparation of messages and tools for the chat template is imitated

    def prompt_ids(self, call: Call) -> tuple[int, ...]:
        """Returns a call's prompt ids; raises `Unusable` for a refused prompt, an image, audio or a file."""
        return self._encode(self._render(call))

    def turn(self, call: Call, answer: JSON) -> Turn:
        """Returns the token ids of a call's prompt and of `answer`, from which the answer can be learned.

        `answer` is an assistant message that was not cut off at its length limit. Raises `Unusable` if the chat
        template leaves a part of it out, or if the answer's tokens cannot be separated from those of the prompt.
        """
        prompt = self._render(call)
        # SDKs send many keys that are null; templates ask whether a key is there.
        given = {key: value for key, value in answer.items() if value is not None}
        added = self._added(call, prompt, given)
        if not _shows(added, given):
            raise Unusable("the chat template leaves a part of the answer out")
        prompt_ids, whole_ids = self._encode(prompt), self._encode(prompt + added)
        # Text that begins alike need not begin with the same ids: a tokenizer may merge across the border.
        if whole_ids[: len(prompt_ids)] != prompt_ids:
            raise Unusable("the answer's first token merges with the prompt's last")
        ids_A = self._upto_end(whole_ids[len(prompt_ids) :])  # A tokens of the answer
        return Turn(prompt_ids, ids_A, (0.0,) * len(ids_A))

    def _added(self, call: Call, prompt: str, answer: JSON) -> str:
        """Returns the text that the answer adds to the prompt."""
        thoughts = next((answer[key] for key in _THOUGHTS if isinstance(answer.get(key), str)), "")
        silent = {key: value for key, value in answer.items() if key not in _THOUGHTS}
        # Under both names: templates differ in the one that they read.
        whole = self._render(call, silent | dict.fromkeys(_THOUGHTS, thoughts) if thoughts else silent)
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        if (opened := _after_opened_thoughts(prompt, whole, thoughts, self.family.thinking)) is not None:
            return opened
        if thoughts and (whole := self._render(call, silent)).startswith(prompt):  # the second remedy
            return whole[len(prompt) :]
        raise Unusable("the chat template renders the prompt otherwise when an answer follows")

    def _render(self, call: Call, answer: JSON | None = None) -> str:
        form, messages = FORMS[self.engine], call.messages if answer is None else (*call.messages, answer)
        try:
            return self.tokenizer.apply_chat_template(
                form.messages(messages, str(self.tokenizer.chat_template)),
                tools=form.tools(call) or None,
                add_generation_prompt=answer is None,
                tokenize=False,
                **template_arguments(call.params),
            )
        except Unusable:
            raise
        except Exception:  # a template may raise anything: jinja's errors, TypeError, KeyError
            raise Unusable("the chat template refuses the messages") from None

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        except (TypeError, UnicodeEncodeError):  # the package tokenizers takes half of a surrogate pair for no text
            raise Unusable("it holds half of a surrogate pair, which is no character") from None

    def _upto_end(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        end_ids = end_ids_of(self.tokenizer, self.family)
        ends = [place for place, token in enumerate(ids) if token in end_ids]
        if not ends or self.tokenizer.decode(ids[ends[-1] + 1 :]).strip():
            raise Unusable("the chat template does not end an answer with a token that ends it when sampled")
        if len(ends) > 1:
            raise Unusable("the answer holds a token that would have ended it")
        return ids[: ends[0] + 1]


def end_ids_of(tokenizer: Any, family: Family) -> frozenset[int]:
    """Returns the ids of the tokens that end an answer: the family's end-of-turn tokens and end-of-sequence."""
    # A tokenizer answers with its unknown token for a name that it does not have.
    named = {tokenizer.convert_tokens_to_ids(token) for token in family.end_of_turn} - {tokenizer.unk_token_id}
    return frozenset(token for token in named | {tokenizer.eos_token_id} if token is not None)


def _after_opened_thoughts(prompt: str, whole: str, thoughts: str, thinking: Thinking | None) -> str | None:
    """Returns the text after a prompt that opens the thoughts (the first remedy); `None` where it does not apply."""
    if thinking is None or not prompt.endswith(thinking.open):
        return None
    head = prompt.removesuffix(thinking.open)
    answer = whole.removeprefix(head)
    if not whole.startswith(head) or answer.startswith(thinking.open.rstrip()):
        return None
    return thoughts.strip("\n") + thinking.close + answer


def _shows(added: str, answer: JSON) -> bool:
    # Templates drop keys that they do not know without a word, tool calls above all.
    said = [content_text(answer.get("content")).rpartition("</think>")[2].strip()]
    said += [call["function"]["name"] for call in answer.get("tool_calls") or ()]
    if not any(said):
        raise Unusable("an answer is empty")
    return all(text in added for text in said)


class Form(NamedTuple):
    """How one engine prepares a call's messages and tools for the chat template."""

    messages: Callable[[Sequence[JSON], str], list[dict[str, Any]]]  # from the messages and the template's text
    tools: Callable[[Call], list[dict[str, Any]]]


def template_arguments(params: JSON) -> dict[str, Any]:
    """Returns the variables that a call's `params` pass to the chat template, besides messages and tools.

    They are those of `chat_template_kwargs`. A `reasoning_effort` is passed on too. As in vLLM, it sets
    `enable_thinking` unless `chat_template_kwargs` does. Only vLLM knows this parameter.
    """
    given: Any = params.get("chat_template_kwargs")
    arguments: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    if (effort := params.get("reasoning_effort")) is None:
        return arguments
    return {"enable_thinking": effort != "none", **arguments, "reasoning_effort": effort}


def content_text(content: Any, between: str = "") -> str:
    """Returns a message's text parts, joined by `between`; raises `Unusable` for an image, audio or a file."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for part in cast("Sequence[Any]", content):
        kind = cast("JSON", part).get("type") if isinstance(part, Mapping) else None
        text = cast("JSON", part).get("refusal" if kind == "refusal" else "text") if kind in _TEXTS else None
        if not isinstance(text, str):
            raise Unusable("it holds an image, audio or file")
        parts.append(text)
    return between.join(parts)


def _embedded_messages(messages: Sequence[JSON], _template: str) -> list[dict[str, Any]]:
    return [_embedded_message(message) for message in messages]


def _embedded_message(message: JSON) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    shown: dict[str, Any] = {**message, "role": role, "content": content_text(message.get("content"))}
    if shown.get("tool_calls"):
        shown["tool_calls"] = [_with_arguments(call, keep=True) for call in shown["tool_calls"]]
    else:
        shown.pop("tool_calls", None)
    return shown


def _embedded_tools(call: Call) -> list[dict[str, Any]]:
    return [] if call.params.get("tool_choice") == "none" else [dict(tool) for tool in call.tools]


def _vllm_messages(messages: Sequence[JSON], template: str) -> list[dict[str, Any]]:
    shown = [_vllm_message(message) for message in messages]
    if '"developer"' in template or "'developer'" in template or all(m["role"] != "developer" for m in shown):
        return shown
    # The template does not know the role: all system and developer messages become one system message, at the top.
    systems = [message for message in shown if message["role"] in ("system", "developer")]
    rest = [message for message in shown if message not in systems]
    if len(systems) == 1 and systems[0] is shown[0]:
        return [{**shown[0], "role": "system"}, *rest]
    return [{"role": "system", "content": "\n\n".join(m["content"] for m in systems if m["content"])}, *rest]


def _vllm_message(message: JSON) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message["role"], "content": content_text(message.get("content"), "\n")}
    if isinstance(message.get("name"), str):
        shown["name"] = message["name"]
    if message["role"] == "tool" and "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    if message["role"] == "assistant":
        thoughts = next((message[key] for key in _THOUGHTS if message.get(key) is not None), None)
        shown |= {} if thoughts is None else dict.fromkeys(_THOUGHTS, thoughts)
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [_with_arguments(call, keep=False) for call in calls]
    return shown


def _vllm_tools(call: Call) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    for given in (tool["function"] for tool in call.tools):
        function = {key: given.get(key) for key in ("name", "description", "parameters")}
        function |= {key: given[key] for key in ("strict", "defer_loading") if given.get(key) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _with_arguments(call: JSON, *, keep: bool) -> dict[str, Any]:
    """Returns the tool call with its arguments as an object; other values are kept, or become `{}`."""
    function = dict(call["function"])
    text = function.get("arguments")
    try:
        parsed = text if isinstance(text, Mapping) else json.loads(text or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, Mapping) or not keep:
        function["arguments"] = parsed if isinstance(parsed, Mapping) else {}
    return {**call, "function": function}


FORMS: Mapping[Engine, Form] = {
    "embedded": Form(_embedded_messages, _embedded_tools),
    "vllm": Form(_vllm_messages, _vllm_tools),
}
