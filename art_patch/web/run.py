"""The page of one run: its steps and their times, what was said, its scores, and what was learned from it.

A run may be long, and each of its texts, too. So a page has at most `CALLS` calls, `STEPS` steps and `SIBLINGS`
siblings, the last `MESSAGES` messages of a prompt, and the beginning of each text; `full` lifts the last two limits.
Nothing that a run holds is trusted: see `templates`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import Field

from art_patch import insights, store
from art_patch._lib.loose_json import shallow
from art_patch.errors import NotFound
from art_patch.trajectories import canonical, main_call
from art_patch.types import JSON, Call, Choice, Correction, SpanInfo, Trajectory, TrajectoryInfo
from art_patch.web.projects import Asked, Query

CALLS, STEPS, SIBLINGS, TOKENS, MESSAGES = 50, 400, 16, 4_000, 200
_LONGEST_TEXT = 20_000  # characters
_LONGEST_VALUE = 2_000  # characters of a step's input or output
_WIDTH = 1_000  # of the timing's picture

# From which probability on a token has which colour, the likeliest first.
_LIKELY = (0.9, 0.5, 0.2, 0.05, 0.01)
# From which size on an advantage has which colour.
_TAUGHT = (0.02, 0.5, 1.25)

_LONGEST_FILE = 64 << 20  # bytes of a tokenizer
_WAITING = 6  # tokens of which a character may consist


class RunQuery(Query):
    """Which part of the run is shown."""

    first: int = Field(1, ge=1, le=1_000_000, description="Number of the first call that is shown.")
    full: bool = Field(False, description="Whether long texts and prompts are returned whole.")
    tokens: bool = Field(False, description="Whether the tokens of answers are returned, with log-probabilities.")


GONE = "there is no such run; it may have been erased, or pruned by the settings of retention"


def run_of(opened: store.Store, key: str) -> Trajectory:
    """Return the run of this id."""
    found = opened.read.trajectories([key])
    if not found:
        raise NotFound(GONE)
    return found[0]


def facts(asked: Asked) -> JSON:
    """Return the page's facts."""
    opened, query, run = asked.store, asked.query, run_of(asked.store, asked.ids["id"])
    (summary,) = opened.browse.summaries([run.id])
    lessons = opened.evidence.lessons(run.id)
    first = min(query.first, max(len(run.calls), 1))
    teller = _Teller(opened, run, lessons, query)
    return {
        "recognised": insights.ORIGINS.get(run.info.origin, run.info.origin),
        "run": _fields(run.info) | {"metadata": shallow(dict(run.info.metadata))},
        "summary": asdict(summary) | {"status": summary.status, "duration_s": summary.duration_s},
        "why_not_learned": why_not_learned(opened, run),
        "group": _group(opened, run),
        "scores": [asdict(score) for score in run.scores],
        "corrections": [
            _fields(each) | {"message": teller.message(each.message)}
            for each in opened.evidence.corrections([run.id]).get(run.id, [])
        ],
        "learned": _learned(lessons),
        "steps": _steps(run, full=query.full),
        "calls": teller.calls(first),
        "first": first,
        "shown": {"calls": CALLS, "steps": STEPS},
        "all": {"calls": len(run.calls), "steps": len(run.calls) + len(run.spans)},
        "query": query.model_dump(),
    }


def _fields(record: TrajectoryInfo | Correction) -> dict[str, Any]:
    # Not `asdict`, which goes into what an app nested hundreds deep.
    return {each.name: getattr(record, each.name) for each in fields(record)}


def why_not_learned(opened: store.Store, run: Trajectory) -> str | None:
    """Return why nothing may be learned from a run, in words; `None` if something may."""
    if not run.info.learn:
        return "the app said that nothing may be learned from it"
    return None if opened.consent.learned_from([run.id]) else "its user withdrew"


def _group(opened: store.Store, run: Trajectory) -> JSON | None:
    key = opened.transfers.groups_of([run.id]).get(run.id, {}).get("id")
    (found,) = opened.browse.groups_like(key, limit=1) if key else (None,)
    if found is None:
        return None
    siblings = opened.browse.summaries(found.runs[:SIBLINGS])
    shown = [asdict(one) | {"status": one.status, "duration_s": one.duration_s} for one in siblings]
    return asdict(found) | {"siblings": shown, "way": insights.way_in_words(found.how)}


def _learned(lessons: Sequence[store.Lesson]) -> list[JSON]:
    """Return what each policy learned from the run, oldest first: from how many answers, with which mean advantage."""
    by_policy: dict[str, list[store.Lesson]] = defaultdict(list)
    for lesson in lessons:
        by_policy[lesson.policy].append(lesson)
    return [
        {
            "policy": name, "state": its[0].state, "group_id": its[0].group_id, "answers": len(its),
            "advantage": sum(each.advantage for each in its) / len(its),
            "weight": sum(each.weight for each in its) / len(its),
        }
        for name, its in by_policy.items()
    ]  # fmt: skip


# --- steps ---


def _steps(run: Trajectory, *, full: bool) -> list[JSON]:
    begun = min([run.info.started_at, *(span.started_at for span in run.spans), *(c.started_at for c in run.calls)])
    ends = [_end(span) for span in run.spans] + [call.started_at + call.duration_ms / 1_000 for call in run.calls]
    whole_s = max(max(ends, default=begun) - begun, 1e-6)
    rows: list[JSON] = []
    for step, _ in zip(insights.steps_of(run.spans, run.calls), range(STEPS), strict=False):
        if step.span is not None:
            row, started, ended = _span_row(step.span, full), step.span.started_at, _end(step.span)
            waited_s = 0.0
        else:
            call = run.calls[(step.call or 1) - 1]
            row, started, ended = _call_row(call), call.started_at, call.started_at + call.duration_ms / 1_000
            waited_s = (call.ttft_ms or 0.0) / 1_000
        x, width = (_WIDTH * part / whole_s for part in (started - begun, max(ended - started, 0.0)))
        bar = {"x": round(x, 1), "width": round(max(width, 2.0), 1), "waited": round(_WIDTH * waited_s / whole_s, 1)}
        times = {"after_s": started - begun, "duration_s": max(ended - started, 0.0)}
        rows.append({"depth": step.depth, "call": step.call, "bar": bar, **times, **row})
    return rows


def _end(span: SpanInfo) -> float:
    return span.started_at if span.ended_at is None else span.ended_at


def _span_row(span: SpanInfo, full: bool) -> JSON:
    # Input and output first, whatever the order in which a framework reports attributes.
    names = sorted(span.attributes, key=lambda name: {"input": 0, "output": 1}.get(name, 2))
    values = [{"name": name} | _text(_plain(span.attributes[name]), full, _LONGEST_VALUE) for name in names]
    return {
        "kind": span.kind, "name": span.name, "error": span.error, "has_ended": span.ended_at is not None,
        "values": values,
    }  # fmt: skip


def _call_row(call: Call) -> JSON:
    failed = None if call.status == "ok" else call.error or call.status
    return {
        "kind": "call", "name": call.policy or "upstream", "error": failed, "has_ended": True, "values": [],
    }  # fmt: skip


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(shallow(value), ensure_ascii=False)


def _text(text: str, full: bool, longest: int = _LONGEST_TEXT) -> dict[str, Any]:
    kept = text if full else text[:longest]
    return {"text": kept, "left": len(text) - len(kept)}


# --- calls ---


class _Teller:
    """Tells what was said in the calls of a run, each message once."""

    def __init__(self, opened: store.Store, run: Trajectory, lessons: Sequence[store.Lesson], query: RunQuery) -> None:
        self._run, self._query = run, query
        self._lessons: dict[tuple[str, int], list[store.Lesson]] = defaultdict(list)
        for lesson in lessons:
            self._lessons[lesson.call_id, lesson.choice].append(lesson)
        self._bases = {each.name: each.base for each in opened.ledger.policies()} if query.tokens else {}
        self._spans = {span.id: span for span in run.spans}
        self._main = main_call(run)
        self._canonical: dict[int, bytes] = {}

    def calls(self, first: int) -> list[JSON]:
        """Return at most `CALLS` calls, from number `first` on."""
        begin = first - 1
        said = [self._conversation(call) for call in self._run.calls[max(begin - CALLS, 0) : begin]]
        found: list[JSON] = []
        for number, call in enumerate(self._run.calls[begin : begin + CALLS], first):
            prompt = [self._key(message) for message in call.messages]
            shared, before = insights.said_before(prompt, said)
            said.append(self._conversation(call))
            found.append(self._call(number, call, shared, before))
        return found

    def message(self, message: JSON) -> JSON:
        """Return a message as parts, each of which says what it is."""
        full, parts = self._query.full, list[JSON]()
        for key in ("reasoning_content", "reasoning", "refusal"):
            if isinstance(message.get(key), str) and message[key]:
                parts.append({"kind": key.removesuffix("_content")} | _text(message[key], full))
        if message.get("content"):
            parts.append({"kind": "text"} | _text(insights.content_words(message["content"]), full))
        for call in insights.tool_calls_of(message):
            name, arguments, key = insights.tool_call_parts(call)
            parts.append({"kind": "tool_call", "name": name, "id": key} | _text(arguments, full))
        about = {key: None if message.get(key) is None else str(message[key]) for key in ("name", "tool_call_id")}
        return {"role": str(message.get("role", "?")), "parts": parts, **about}

    def _conversation(self, call: Call) -> list[bytes]:
        messages = [*call.messages, *(choice.message for choice in call.choices[:1])]
        return [self._key(message) for message in messages]

    def _key(self, message: JSON) -> bytes:
        # The calls of a run share the messages that they have in common.
        if (known := self._canonical.get(id(message))) is None:
            known = self._canonical[id(message)] = canonical(message)
        return known

    def _call(self, number: int, call: Call, shared: int, before: int) -> JSON:
        own = {name: getattr(call, name) for name in (
            "id", "started_at", "requested_model", "policy", "answered_by", "status", "error", "fallback",
            "untrainable", "api", "shadow_of", "in_control_group", "duration_ms", "ttft_ms", "prompt_tokens",
            "completion_tokens",
        )}  # fmt: skip
        within, span = list[str](), self._spans.get(call.span_id or "")
        while span is not None and len(within) < 8:
            within.insert(0, span.name)
            span = self._spans.get(span.parent_id or "")
        new = call.messages[shared:]
        shown = new if self._query.full else new[-MESSAGES:]
        return own | {
            "number": number,
            "within": within,
            "params": {name: _plain(value) for name, value in call.params.items()},
            "tools": [insights.tool_name(tool) for tool in call.tools],
            # Of another conversation, in which a sub-agent began or went on.
            "continues": shared if shared and shared < before else None,
            "is_new_conversation": number > 1 and not shared and bool(call.messages),
            "is_main": self._main is not None and call.id == self._main.id,
            "messages_left": len(new) - len(shown),
            "messages": [self.message(message) for message in shown],
            "answers": [self._answer(call, choice) for choice in call.choices],
        }

    def _answer(self, call: Call, choice: Choice) -> JSON:
        lessons = self._lessons.get((call.id, choice.index), [])
        return {
            "index": choice.index,
            "message": self.message(choice.message),
            "correctable": _correctable(choice.message),
            "finish_reason": choice.finish_reason,
            "logprob_mean": insights.logprob_mean(choice),
            "tokens_known": None if choice.token_ids is None else len(choice.token_ids),
            "lessons": [asdict(each) | {"level": advantage_level(each.advantage)} for each in lessons],
            "tokens": self._tokens(call, choice) if self._query.tokens else None,
        }

    def _tokens(self, call: Call, choice: Choice) -> JSON | None:
        if choice.token_ids is None:
            return None
        ids = choice.token_ids[:TOKENS]
        texts = token_texts(self._bases.get(call.policy or "", ""), ids)
        logprobs = list(choice.logprobs or ())[: len(ids)]
        logprobs += [math.nan] * (len(ids) - len(logprobs))
        rows = [
            {
                "text": f"{key} " if texts is None else texts[place],
                "logprob": value if math.isfinite(value) else None,
                "level": logprob_level(value),
            }
            for place, (key, value) in enumerate(zip(ids, logprobs, strict=True))
        ]
        return {"rows": rows, "are_ids": texts is None, "left": len(choice.token_ids) - len(ids)}


def _correctable(message: JSON) -> JSON:
    """Return the answer as a person edits it: its text, or the whole message as JSON if it calls tools."""
    if insights.tool_calls_of(message) or not isinstance(message.get("content"), str):
        kept = {key: value for key, value in message.items() if value not in (None, "", [])}
        return {"how": "json", "text": json.dumps(shallow(kept), ensure_ascii=False, indent=1)}
    return {"how": "text", "text": message["content"]}


def logprob_level(logprob: float) -> int:
    """Return 0 for a token that the policy was nearly sure of, up to 5 for a rare one, or one without a number."""
    if not math.isfinite(logprob):
        return len(_LIKELY)
    return next((level for level, least in enumerate(_LIKELY) if math.exp(logprob) >= least), len(_LIKELY))


def advantage_level(advantage: float) -> int:
    """Return 0 for an advantage that changes nearly nothing, up to 3, or down to -3."""
    size = sum(abs(advantage) >= least for least in _TAUGHT)
    return size if advantage >= 0 else -size


# --- tokens ---


def token_texts(base: str, ids: Sequence[int]) -> list[str] | None:
    """Return the text of each token, together the text of all; `None` if it cannot be known here.

    Nothing is tokenised: the ids are those that the engine sampled. The base's tokenizer must be on this machine, and
    the package `tokenizers`, which the extra `train` brings. If a character consists of several tokens, the last one
    of them has it, and the others are empty.
    """
    path = Path(base) / "tokenizer.json"
    try:
        facts = path.stat()
    except OSError:
        return None
    tokenizer = _tokenizer(path, facts.st_mtime_ns) if facts.st_size <= _LONGEST_FILE else None
    return None if tokenizer is None else _texts(tokenizer, ids)


@lru_cache(maxsize=2)  # each may take a hundred megabytes
def _tokenizer(path: Path, _changed: int) -> Any:
    try:
        return import_module("tokenizers").Tokenizer.from_file(str(path))
    except Exception:  # also without the package, which raises bare `Exception` for files that it cannot read
        return None


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    texts: list[str] = []
    start = 0  # of the window that is decoded
    done = 0  # tokens whose text is known
    for end in range(1, len(ids) + 1):
        # The window starts before what is new, because some tokenizers write a token differently when it comes first.
        before: str = tokenizer.decode(list(ids[start:done]), skip_special_tokens=False)
        text: str = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
        if text.endswith("\ufffd") and end < len(ids) and end - done < _WAITING:
            texts.append("")  # a part of a character
            continue
        texts.append(text[len(before) :])
        start, done = done, end
    return texts
