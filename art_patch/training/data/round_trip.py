"""Checks whether rendering and encoding the text of recorded calls gives the recorded token ids again.

The check does no I/O and changes nothing that is trained. Training uses the recorded ids, so a difference is not an
error. A difference shows where retokenising gives other tokens (in demonstrations, in other trainers, or in an agent's
next turn), and why a conversation becomes several rows (token sequences). Three questions are asked about each
trainable call:

- Does the chat template render the call's messages and tools to the recorded prompt ids, with the messages prepared as
  one of the two engines prepares them?
- Does the text of prompt and answer encode to the recorded ids?
- Does the call's prompt begin with the prompt and answer of the call that it continues?

The first check can fail because of the date: Llama 3.2's template writes the current day into the prompt.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from art_patch.formats import Unusable
from art_patch.training.data.rendering import FORMS, Engine, Renderer
from art_patch.training.data.rows import Turn, recorded_turn
from art_patch.training.families import DEFAULT, Family
from art_patch.types import Call, Trajectory

Kind = Literal[
    "the prompt cannot be rendered",
    "the prompt is rendered otherwise",
    "the text encodes otherwise",
    "thinking was stripped from history",
    "history was rendered otherwise",
]

_EXAMPLES = 5
_AROUND = 6  # tokens shown before and after the place where two sequences part

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which a call's recorded tokens differ from the rendered or encoded tokens."""

    kind: Kind  # the comparison that found the difference
    call_id: str
    place: int  # index of the first token that differs, from 0
    # Up to six tokens each, as their own texts, so that white space and the borders between tokens are visible: common
    # ones directly before the difference, recorded ones from there on, and rendered or encoded ones.
    before: tuple[str, ...] = ()
    recorded: tuple[str, ...] = ()
    rendered: tuple[str, ...] = ()

    def as_text(self) -> str:
        """Returns four readable lines: the kind with call and position, and the tokens around the difference."""
        shown = {"before": self.before, "recorded": self.recorded, "rendered": self.rendered}
        lines = [f"{self.kind}: call {self.call_id}, token {self.place}"]
        return "\n".join(lines + [f"  {name:<9}{' '.join(map(repr, texts))}" for name, texts in shown.items()])


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Result of `check_round_trips`: counts of calls and differences, and a few examples."""

    calls: int  # number of calls that were checked
    unchecked: int  # number of trainable calls that were not checked because of `limit`
    exact: int  # number of checked calls without any difference
    engines: Mapping[Engine, int]  # number of recorded prompts that equal the prompt rendered as each engine does it
    differences: Mapping[Kind, int]  # number of differences of each kind; one call may have several
    examples: tuple[Difference, ...]  # at most five: the first of each kind, then the second of each, and so on

    @property
    def engine(self) -> Engine:
        """The engine whose way of preparing messages for the chat template reproduces most of the recorded prompts."""
        return max(self.engines, key=lambda engine: self.engines[engine])

    def as_text(self) -> str:
        """Returns a readable text: the count of exact calls, the count of each kind of difference, and the examples."""
        lines = [f"{self.exact} of {self.calls} calls are what the chat template makes of them"]
        lines += [f"{count:>6}  {kind}" for kind, count in self.differences.items()]
        return "\n".join(lines + [example.as_text() for example in self.examples])

    def metrics(self) -> dict[str, Any]:
        """Returns the counts as JSON values, without the examples."""
        # Examples quote what somebody wrote, and metrics are kept when the trajectories are erased.
        return {name: value for name, value in asdict(self).items() if name != "examples"}


def check_round_trips(
    trajectories: Iterable[Trajectory], tokenizer: Any, *, family: Family = DEFAULT, limit: int = 64
) -> RoundTrips:
    """Checks whether the base model's chat template and tokenizer reproduce the recorded tokens of trainable calls.

    At most `limit` trainable calls are checked, spread evenly over all. The tags of `family` around thoughts show
    whether a template removed thoughts from the history.
    """
    calls = [
        (trajectory, position, turn)
        for trajectory in trajectories
        for position, call in enumerate(trajectory.calls)
        if isinstance(turn := recorded_turn(call, trajectory.calls[position + 1 :]), Turn)
    ]
    # Spread over all, because calls that follow one another are alike.
    chosen = [calls[index * len(calls) // limit] for index in range(limit)] if len(calls) > limit else calls
    engines: dict[Engine, int] = dict.fromkeys(FORMS, 0)
    found: list[Difference] = []
    for trajectory, position, turn in chosen:
        call = trajectory.calls[position]
        rendered: list[Ids] = []
        for engine in FORMS:
            with suppress(Unusable):
                rendered.append(ids := Renderer(tokenizer, family, engine).prompt_ids(call))
                engines[engine] += ids == turn.prompt_ids
        found += _prompt(call, turn, rendered, tokenizer)
        found += _text(call, turn, tokenizer)
        found += _history(trajectory, position, turn, tokenizer, family)
    return RoundTrips(
        calls=len(chosen),
        unchecked=len(calls) - len(chosen),
        exact=len(chosen) - len({difference.call_id for difference in found}),
        engines=engines,
        differences=dict(Counter(difference.kind for difference in found)),
        examples=_first_of_each(found),
    )


def _prompt(call: Call, turn: Turn, rendered: Sequence[Ids], tokenizer: Any) -> list[Difference]:
    if turn.prompt_ids in rendered:
        return []
    if not rendered:
        return [Difference("the prompt cannot be rendered", call.id, 0)]
    # Of the two engines' forms, the one that agrees longest is the one that was meant.
    nearest = max(rendered, key=lambda ids: _common(turn.prompt_ids, ids))
    return [_difference("the prompt is rendered otherwise", call, turn.prompt_ids, nearest, tokenizer)]


def _text(call: Call, turn: Turn, tokenizer: Any) -> list[Difference]:
    whole = turn.prompt_ids + turn.answer_ids_A
    again = tuple(tokenizer.encode(_decoded(whole, tokenizer), add_special_tokens=False))
    return [] if again == whole else [_difference("the text encodes otherwise", call, whole, again, tokenizer)]


def _history(trajectory: Trajectory, position: int, turn: Turn, tokenizer: Any, family: Family) -> list[Difference]:
    call = trajectory.calls[position]
    before = _turn_before(trajectory.calls, position)
    if before is None:
        return []
    whole = before.prompt_ids + before.answer_ids_A
    if turn.prompt_ids[: len(whole)] == whole:
        return []
    # A template that strips thoughts leaves fewer closing tags in the history than were recorded.
    tag = family.thinking.close.strip() if family.thinking else ""
    stripped = tag and _decoded(whole, tokenizer).count(tag) > _decoded(turn.prompt_ids, tokenizer).count(tag)
    kind: Kind = "thinking was stripped from history" if stripped else "history was rendered otherwise"
    return [_difference(kind, call, whole, turn.prompt_ids, tokenizer)]


def _turn_before(calls: Sequence[Call], position: int) -> Turn | None:
    """Returns the latest turn whose messages are the beginning of this call's messages, with an answer after them."""
    # Backwards: after a fork the latest call that fits is the one that this call continues.
    messages = calls[position].messages
    for index in range(position - 1, -1, -1):
        depth = len(calls[index].messages)
        if depth < len(messages) and messages[depth].get("role") == "assistant":
            turn = recorded_turn(calls[index], calls[index + 1 :])
            if isinstance(turn, Turn) and calls[index].messages == messages[:depth]:
                return turn
    return None


def _difference(kind: Kind, call: Call, recorded: Ids, rendered: Ids, tokenizer: Any) -> Difference:
    place = _common(recorded, rendered)
    from_there = slice(place, place + _AROUND)
    shown = (recorded[max(0, place - _AROUND) : place], recorded[from_there], rendered[from_there])
    return Difference(kind, call.id, place, *(_texts(ids, tokenizer) for ids in shown))


def _common(one: Ids, other: Ids) -> int:
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def _texts(ids: Ids, tokenizer: Any) -> tuple[str, ...]:
    texts = (_decoded((token,), tokenizer) for token in ids)
    # A token that holds half a character decodes to the replacement character, like any other half: show its id.
    return tuple(f"#{token}" if "\ufffd" in text else text for token, text in zip(ids, texts, strict=True))


def _decoded(ids: Ids, tokenizer: Any) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _first_of_each(found: Sequence[Difference]) -> tuple[Difference, ...]:
    """Returns the first difference of each kind, then the second of each, up to `_EXAMPLES`."""
    seen: Counter[Kind] = Counter()
    ranked: list[tuple[int, Difference]] = []
    for difference in found:
        ranked.append((seen[difference.kind], difference))
        seen[difference.kind] += 1
    return tuple(difference for _, difference in sorted(ranked, key=lambda pair: pair[0]))[:_EXAMPLES]
