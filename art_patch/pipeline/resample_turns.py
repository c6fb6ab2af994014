"""The step `resample`: makes siblings for runs that have none, by letting the champion answer recorded turns again.

`answer_again` sends a policy one recorded prompt, with exactly the recorded tokens. No tool runs, so production systems
are not touched. `ask_both` does so for the gate, which compares two policies on such answers.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from datetime import datetime
from threading import Lock
from typing import Any, NamedTuple

from art_patch import gate, grouping, serving, trajectories
from art_patch._lib.ids import new_id
from art_patch.errors import ConfigError, EngineError
from art_patch.pipeline.cycle_run import Cycle
from art_patch.types import Call, Choice, Group, Policy

_GIVE_UP_AFTER = 3  # failures of the engine in a row
_GATE_CONCURRENCY = 16
_LIMITS = ("max_tokens", "max_completion_tokens", "stop")
_RENDERING = ("chat_template_kwargs",)


class OtherPrompt(EngineError):
    """Raised if the engine renders a prompt other than the recorded one, so that its answer cannot be compared."""


class Answers(NamedTuple):
    """The answers of a policy to one prompt, with their token ids, and the time until the final one was complete."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    duration_ms: float


def resample(run: Cycle, champion: Policy, found: grouping.Grouping) -> None:
    """Let the champion answer turns of runs for which `group` found no siblings; write a group for each turn.

    If the engine fails three times in a row, the cycle goes on without the rest, which waits for the next one.
    """
    config = run.config.resample
    if config is None:
        return
    metrics: Counter[str] = Counter()
    lonely = [*found.waiting, *found.others]
    cycles = run.store.ledger.note_cycle(now=run.now)
    result: dict[str, Any] = {"runs": len(lonely)}
    run.metrics["resample"] = result
    if not is_open(config.window, datetime.now()):
        result["left"] = {f"outside of {config.window}": len(lonely)}
        return
    # A turn that a person corrected is where its run went wrong, so it is asked first.
    corrected = run.store.evidence.corrected_calls([trajectory.id for trajectory in lonely])
    turns, left = grouping.choose_turns(
        lonely, config, keys=found.keys, corrected=corrected, waited=_waited(run, cycles, found)
    )
    if odd := len(turns) - len(turns := [turn for turn in turns if is_text(turn.call)]):
        left["the prompt holds half of a surrogate pair, which no engine reads"] = odd
    pace = _Pace(config.per_minute)
    asked_again: set[str] = set()
    failed = 0
    with ThreadPoolExecutor(config.concurrency, thread_name_prefix="art-patch-resample") as pool:
        asked = {pool.submit(_ask, run, champion, turn, config, pace): turn for turn in turns}
        for done, future in enumerate(as_completed(asked), 1):
            turn = asked[future]
            try:
                alternatives = future.result()
            except OtherPrompt:
                metrics["other_prompt"] += 1
            except EngineError as error:
                failed, reason = failed + 1, str(error)
                metrics["failed"] += 1
                if failed >= _GIVE_UP_AFTER and not pace.stopped:
                    pace.stopped = True
                    left[f"the engine failed: {reason}"] = len(turns) - done
            else:
                failed = 0
                if alternatives:
                    metrics["samples"] += len(alternatives)
                    metrics["turns"] += 1
                    metrics["groups"] += _keep_group(run, turn, alternatives)
                    if turn.trajectory.id not in asked_again:
                        asked_again.add(turn.trajectory.id)
                        # The run itself goes into a group of its own, so that no later cycle asks its turns again.
                        source = Group(new_id(), turn.scenario_key, "single", (turn.trajectory,))
                        run.store.ledger.add_groups([source], state="resampled", now=run.now)
            try:
                run.progress("resample", done, len(turns), f"{metrics['groups']} groups")
            except BaseException:
                # The time is over or the lease is lost. The pool would still ask all waiting turns.
                pace.stopped = True
                raise
    result |= {"turns": metrics["turns"], "samples": metrics["samples"], "groups": metrics["groups"]}
    result |= {name: metrics[name] for name in ("other_prompt", "failed") if metrics[name]}
    result["left"] = left


def _waited(run: Cycle, cycles: Sequence[float], found: grouping.Grouping) -> dict[str, int]:
    """Return scenario key -> in how many of the `cycles` (seconds since the epoch) its oldest run was complete."""
    complete_at: dict[str, float] = {}
    for waiting in found.waiting:
        ended = max(call.started_at + call.duration_ms / 1000 for call in waiting.calls)
        key = found.keys[waiting.id]
        complete_at[key] = min(ended + run.config.settle_s, complete_at.get(key, math.inf))
    return {key: sum(at <= cycle for cycle in cycles) for key, at in complete_at.items()}


def is_text(call: Call) -> bool:
    """Return whether a call's prompt can be sent: half of a surrogate pair, say, has no form in UTF-8."""
    try:
        json.dumps([call.messages, call.tools], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def is_open(window: str | None, now: datetime) -> bool:
    """Return whether the time lies in the window `HH:MM-HH:MM`, past midnight too; `ConfigError` for another form."""
    if window is None:
        return True
    try:
        begin, end = (datetime.strptime(part.strip(), "%H:%M").time() for part in window.split("-"))
    except ValueError:
        raise ConfigError(f"{window!r} is no window of the day; write it like 22:00-06:00") from None
    if begin == end:
        raise ConfigError(f"{window!r} begins when it ends; leave it out for the whole day")
    at = now.time()
    return begin <= at < end if begin <= end else at >= begin or at < end


def _ask(
    run: Cycle, champion: Policy, turn: grouping.ResampleTurn, config: grouping.ResampleConfig, pace: "_Pace"
) -> list[Call]:
    """Return one call for each new answer; an empty list if the step was stopped."""
    if not pace.wait():
        return []
    given = turn.call.params.get("temperature")
    # Siblings must differ: at a temperature of (nearly) 0 all answers would be equal and teach nothing.
    temperature = given if isinstance(given, int | float) and given >= 0.01 else config.temperature
    answers = answer_again(
        run.engine, champion.name, turn.call, config.samples, temperature=temperature, priority=config.priority
    )
    limits = {name: turn.call.params[name] for name in _LIMITS if name in turn.call.params}
    made: list[Call] = []
    for choice in answers.choices:
        call = Call(
            # `turn_group` gives both ids.
            id="",
            trajectory_id="",
            started_at=time.time() - answers.duration_ms / 1000,
            duration_ms=answers.duration_ms,
            requested_model=turn.call.requested_model,
            messages=turn.call.messages,
            tools=turn.call.tools,
            # One call for each answer: siblings are trajectories, and a trajectory goes on from one answer.
            choices=(replace(choice, index=0),),
            params={**limits, "temperature": temperature},
            policy=champion.name,
            prompt_token_ids=answers.prompt_token_ids,
            prompt_tokens=len(answers.prompt_token_ids),
            completion_tokens=len(choice.token_ids or ()),
        )
        made.append(replace(call, untrainable=trajectories.why_untrainable(call)))
    return made


def _keep_group(run: Cycle, turn: grouping.ResampleTurn, alternatives: list[Call]) -> bool:
    """Write the turn's group to the store; return whether there is one."""
    group = grouping.turn_group(turn, alternatives, new_id=new_id, at=run.now)
    if group is None:
        return False
    run.store.write([record for sibling in group.trajectories for record in (sibling.info, *sibling.calls)])
    run.store.ledger.add_groups([group], now=run.now)
    return True


class _Pace:
    """Lets at most `per_minute` threads through in a minute, evenly, until `stopped` is set."""

    def __init__(self, per_minute: float | None) -> None:
        self._every_s = 60 / per_minute if per_minute else 0.0
        self._next = time.monotonic()
        self._lock = Lock()
        self.stopped = False

    def wait(self) -> bool:
        """Block until it is this thread's turn; return `False` if the pace was stopped."""
        with self._lock:
            mine = max(self._next, time.monotonic())
            self._next = mine + self._every_s
        while not self.stopped and (left := mine - time.monotonic()) > 0:
            # Short sleeps, so that a stopped cycle does not wait for the whole interval.
            time.sleep(min(left, 0.2))
        return not self.stopped


def answer_again(
    engine: serving.EngineClient, policy: str, call: Call, samples: int, *, temperature: float | None, priority: int = 0
) -> Answers:
    """Return `samples` answers of a policy to the prompt of a recorded call, with log-probabilities.

    Args:
        temperature: sampling temperature. `None`: the engine's default, which is 1.
        priority: as in vLLM: a request with a larger number waits for smaller ones; the app's own calls have 0.

    Raises:
        OtherPrompt: the engine's prompt differs from the recorded one. Calls of upstream have no recorded token ids, so
            their prompts are not compared.
        EngineError: the engine did not answer, or answered with an error.
    """
    # Of the recorded parameters only those that limit an answer's length or change how its prompt is rendered.
    body = {name: call.params[name] for name in (*_LIMITS, *_RENDERING) if name in call.params}
    given = {"temperature": temperature, "tools": list(call.tools) or None, "priority": priority or None}
    body |= {name: value for name, value in given.items() if value is not None}
    started = time.monotonic()
    # The ids of the prompt and of the answer: without them nothing could be trained on or compared to the token.
    body |= {"n": samples, "logprobs": True, "return_token_ids": True}
    answer = engine.chat(model=policy, messages=list(call.messages), **body)
    prompt = tuple(answer["prompt_token_ids"])
    if call.prompt_token_ids is not None and prompt != call.prompt_token_ids:
        raise OtherPrompt(
            f"call {call.id} has another prompt now than when it was recorded (another chat template?); "
            "serve the base with the template that traffic was recorded with"
        )
    return Answers(prompt, tuple(map(_choice, answer["choices"])), (time.monotonic() - started) * 1000)


def _choice(choice: dict[str, Any]) -> Choice:
    tokens = (choice.get("logprobs") or {}).get("content")
    return Choice(
        choice["index"],
        choice["message"],
        choice["finish_reason"],
        tuple(choice.get("token_ids") or ()),
        None if tokens is None else tuple(float(token["logprob"]) for token in tokens),
    )


def ask_both(run: Cycle, turns: Sequence[gate.Turn], candidate: Policy, champion: Policy | None) -> list[gate.Answered]:
    """Let both policies answer the turns of a gate; upstream's recorded answers stand in for a missing `champion`."""

    def answers_of(policy: Policy, turn: gate.Turn) -> Answers:
        temperature, samples = turn.call.params.get("temperature"), run.config.gate.samples
        return answer_again(run.engine, policy.name, turn.call, samples, temperature=temperature)

    def given(answers: Answers) -> gate.Given:
        return gate.Given(answers.choices, answers.duration_ms)

    def both(place: int, turn: gate.Turn) -> gate.Answered:
        if champion is None:
            ours = answers_of(candidate, turn)
            # Upstream's answers have no tokens, and both sides must be measured alike.
            alike = tuple(replace(choice, token_ids=None, logprobs=None) for choice in ours.choices)
            return gate.Answered(turn, replace(given(ours), choices=alike), gate.Given(turn.call.choices, None))
        # The order alternates: latency is compared too, and the second policy finds the prompt in the engine's cache.
        order = (champion, candidate) if place % 2 else (candidate, champion)
        found = {policy.name: answers_of(policy, turn) for policy in order}
        ours, theirs = found[candidate.name], found[champion.name]
        # A turn of upstream's, or of the suite, has no tokens yet, and a teacher reads them.
        asked = replace(turn, call=replace(turn.call, prompt_token_ids=ours.prompt_token_ids))
        return gate.Answered(asked, given(ours), given(theirs))

    answers: list[gate.Answered] = []
    with ThreadPoolExecutor(_GATE_CONCURRENCY) as pool:
        for done, answered in enumerate(pool.map(both, range(len(turns)), turns), 1):
            answers.append(answered)
            run.progress("gate: answers", done, len(turns))
    return answers
