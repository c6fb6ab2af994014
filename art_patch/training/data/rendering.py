"""A call to the ids that the engine makes of its prompt, and of an answer that no policy of ours gave. Pure.

An answer's ids are what the template adds when the answer is appended to the prompt, if text and ids of the whole begin
with those of the prompt. What is learned ends with the one end-of-turn token; only white space may follow it. An answer
without thoughts is learned as the template writes it: Qwen 3's empty block is learned too.

Two remedies are tried where the whole does not begin with the prompt, and nothing else:

- The prompt opens the thoughts and the template leaves them out of the answer (DeepSeek R1): they are put there, or
  none, closed as the family closes them.
- The prompt says that there are no thoughts (`enable_thinking: false`) and the answer has some: it is rendered without.

Whatever cannot be rendered is refused with `Unusable`, whose text is the same for all of its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from art_patch.formats import Unusable
from art_patch.training.data.prompt_forms import FORMS, THOUGHTS, Engine, content_text, template_arguments
from art_patch.training.data.rows import Turn
from art_patch.training.kernels.families import Family, Thinking
from art_patch.types import JSON, Call


@dataclass(frozen=True, slots=True)
class Renderer:
    """A base model's tokenizer, and how it is used.

    Attributes:
        tokenizer: of transformers, with a chat template.
        family: of the base model.
        engine: that serves.
    """

    tokenizer: Any
    family: Family
    engine: Engine = "embedded"

    def prompt_ids(self, call: Call) -> tuple[int, ...]:
        """Return what the engine makes of a call's prompt.

        Raises:
            Unusable: the template refuses it.
        """
        return self._encode(self._render(call, call.messages, generate=True))

    def turn(self, call: Call, answer: JSON) -> Turn:
        """Return an answer to a call, to be learned.

        Args:
            call: what was asked.
            answer: an assistant message that ends where it should.

        Raises:
            Unusable: the template cannot show it, or not exactly.
        """
        prompt = self._render(call, call.messages, generate=True)
        # SDKs send many keys that are null; templates ask whether a key is there.
        given = {key: value for key, value in answer.items() if value is not None}
        added = self._added(call, prompt, given)
        if not _shows(added, given):
            raise Unusable("the chat template leaves a part of the answer out")
        prompt_ids, whole_ids = self._encode(prompt), self._encode(prompt + added)
        if whole_ids[: len(prompt_ids)] != prompt_ids:
            raise Unusable("the answer's first token merges with the prompt's last")
        ids_A = self._upto_end(whole_ids[len(prompt_ids) :])
        return Turn(prompt_ids, ids_A, (0.0,) * len(ids_A))

    def _added(self, call: Call, prompt: str, answer: JSON) -> str:
        """The text that the answer adds to the prompt."""
        thoughts = next((answer[key] for key in THOUGHTS if isinstance(answer.get(key), str)), "")
        silent = {key: value for key, value in answer.items() if key not in THOUGHTS}
        whole = self._whole(call, silent | dict.fromkeys(THOUGHTS, thoughts) if thoughts else silent)
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        opened = _after_opened_thoughts(prompt, whole, thoughts, self.family.thinking)
        if opened is not None:
            return opened
        if thoughts and (whole := self._whole(call, silent)).startswith(prompt):
            return whole[len(prompt) :]
        raise Unusable("the chat template renders the prompt otherwise when an answer follows")

    def _whole(self, call: Call, answer: JSON) -> str:
        return self._render(call, (*call.messages, answer), generate=False)

    def _render(self, call: Call, messages: Sequence[JSON], *, generate: bool) -> str:
        form = FORMS[self.engine]
        try:
            return self.tokenizer.apply_chat_template(
                form.messages(messages, str(self.tokenizer.chat_template)),
                tools=form.tools(call) or None,
                add_generation_prompt=generate,
                tokenize=False,
                **template_arguments(call.params),
            )
        except Unusable:
            raise
        except Exception:  # a template may raise anything: jinja's errors, TypeError, KeyError
            raise Unusable("the chat template refuses the messages") from None

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _upto_end(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        end_ids = end_ids_of(self.tokenizer, self.family)
        ends = [place for place, token in enumerate(ids) if token in end_ids]
        if not ends or self.tokenizer.decode(ids[ends[-1] + 1 :]).strip():
            raise Unusable("the chat template does not end an answer with a token that ends it when sampled")
        if len(ends) > 1:
            raise Unusable("the answer holds a token that would have ended it")
        return ids[: ends[0] + 1]


def end_ids_of(tokenizer: Any, family: Family) -> frozenset[int]:
    """Return the tokens that end an answer."""
    named = {tokenizer.convert_tokens_to_ids(token) for token in family.end_of_turn} - {tokenizer.unk_token_id}
    return frozenset(token for token in named | {tokenizer.eos_token_id} if token is not None)


def _after_opened_thoughts(prompt: str, whole: str, thoughts: str, thinking: Thinking | None) -> str | None:
    """The first remedy: what follows a prompt that opens the thoughts; `None` if it does not, or they are shown."""
    if thinking is None or not prompt.endswith(thinking.open):
        return None
    head = prompt.removesuffix(thinking.open)
    answer = whole.removeprefix(head)
    if not whole.startswith(head) or answer.startswith(thinking.open.rstrip()):
        return None
    return thoughts.strip("\n") + thinking.close + answer


def _shows(added: str, answer: JSON) -> bool:
    """Whether all that the answer says is in the text; templates drop what they do not know, tool calls above all."""
    said = [content_text(answer.get("content")).rpartition("</think>")[2].strip()]
    said += [call["function"]["name"] for call in answer.get("tool_calls") or ()]
    if not any(said):
        raise Unusable("an answer is empty")
    return all(text in added for text in said)
