"""A task in one sentence -> scenarios, written by a model, and kept in a file.

- In: the sentence, a client and the name of a model that writes. Out: what users would ask, each one different, and
  the agent's system prompt: the task itself, or one that the model wrote.
- What the model says is read leniently (prose or a code fence around the JSON, objects in place of strings) and
  checked: no repetitions up to case and punctuation, nothing empty, nothing longer than `LONGEST` characters.
- The file is written after every answer, so what was paid for is never asked for again: not by the next run, and not by
  one that goes on after a failure. It may be read and edited by hand.
- One question in four is held out, by a hash of its words that no seed moves. It is never trained on.
- A model that brings nothing new in three answers running is an error; what it wrote until then is kept.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

LONGEST = 600
_AT_ONCE = 25
_IN_VAIN = 3

_ASK_FOR_QUESTIONS = """\
An assistant has this task: {task}

Write {count} messages that users would send to it: realistic, each about something else or asked another way, easy and
hard ones. Every message must be complete in itself.
Answer with a JSON list of {count} strings and nothing else.
{known}"""
_ASK_FOR_PROMPT = """\
An assistant has this task: {task}

Write the system prompt for it, in at most five sentences. Answer with the prompt and nothing else."""


@dataclass(frozen=True)
class Scenarios:
    """What the agent is for, and what it is asked."""

    task: str
    written_by: str
    system_prompt: str = ""
    questions: tuple[str, ...] = ()

    def held_out(self) -> list[str]:
        """The questions of the examination."""
        return [question for question in self.questions if _is_held_out(question)]

    def to_learn_from(self) -> list[str]:
        """All others."""
        return [question for question in self.questions if not _is_held_out(question)]

    def lessons(self, count: int, seed: str) -> list[str]:
        """Some of the others, drawn anew for each seed; all of them if there are no more."""
        rest = self.to_learn_from()
        return random.Random(seed).sample(rest, min(count, len(rest)))


async def write_scenarios(
    client: AsyncOpenAI, model: str, task: str, *, count: int, file: Path, own_prompt: bool = False
) -> Scenarios:
    """Return the file's scenarios, after the model wrote what is missing.

    Args:
        client: that reaches the model.
        model: that writes.
        task: in a sentence.
        count: of scenarios.
        file: where they are kept.
        own_prompt: let the model write the system prompt, too.

    Raises:
        ValueError: the file is of another task, or the model writes nothing that can be used.
    """
    kept = _read(file) if file.exists() else Scenarios(task, model)
    if kept.task != task:
        raise ValueError(f"{file} is of another task, {kept.task!r}; name another file with --scenarios")
    prompt = kept.system_prompt
    if own_prompt and prompt in ("", _as_prompt(task)):
        prompt = (await _ask(client, model, _ASK_FOR_PROMPT.format(task=task))).strip()
    kept = _keep(file, kept, system_prompt=prompt or _as_prompt(task))
    in_vain = 0
    while len(kept.questions) < count:
        known = f"These are known, write others: {json.dumps(kept.questions)}" if kept.questions else ""
        wanted = min(_AT_ONCE, count - len(kept.questions))
        said = await _ask(client, model, _ASK_FOR_QUESTIONS.format(task=task, count=wanted, known=known))
        questions = distinct([*kept.questions, *read_list(said)])[:count]
        in_vain = 0 if len(questions) > len(kept.questions) else in_vain + 1
        if in_vain == _IN_VAIN:
            raise ValueError(
                f"{model} wrote {len(questions)} of {count} scenarios and nothing new in {_IN_VAIN} answers; "
                f"ask for fewer with --count, or name another --helper-model. Its last answer: {said[:200]!r}"
            )
        kept = _keep(file, kept, questions=tuple(questions))
    return kept


def read_list(said: str) -> list[str]:
    """Return the strings of a JSON list in what a model said, of an object its first value; nothing without a list."""
    begin, end = said.find("["), said.rfind("]")
    try:
        found: Any = json.loads(said[begin : end + 1])
    except ValueError:
        return []
    values = (next(iter(each.values()), None) if isinstance(each, dict) else each for each in found)
    return [value.strip() for value in values if isinstance(value, str)]


def distinct(questions: Iterable[str]) -> list[str]:
    """Return what can be asked, each once, in order."""
    first: dict[str, str] = {}
    for question in questions:
        if _words(question) and len(question) <= LONGEST:
            first.setdefault(_words(question), question)
    return list(first.values())


async def _ask(client: AsyncOpenAI, model: str, text: str) -> str:
    said = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
    return said.choices[0].message.content or ""


def _as_prompt(task: str) -> str:
    return f"{task[:1].upper()}{task[1:].rstrip('. ')}."


def _read(file: Path) -> Scenarios:
    told = json.loads(file.read_text())
    return Scenarios(**told | {"questions": tuple(told["questions"])})


def _keep(file: Path, kept: Scenarios, **changes: Any) -> Scenarios:
    changed = Scenarios(**asdict(kept) | changes)
    if changed != kept or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(changed), indent=1, ensure_ascii=False))
        unfinished.replace(file)
    return changed


def _words(question: str) -> str:
    return " ".join(re.findall(r"\w+", question.casefold()))


def _is_held_out(question: str) -> bool:
    return hashlib.sha256(_words(question).encode()).digest()[0] % 4 == 0
