"""Runs that have no siblings -> turn-level groups in the store, by asking the champion again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from datetime import datetime
from threading import Lock
from typing import Any

from art_patch._lib.ids import new_id
from art_patch.errors import ConfigError, EngineError
from art_patch.grouping import Grouping, ResampleConfig, ResampleTurn, choose_turns, turn_group
from art_patch.pipeline.asking import OtherPrompt, answer_again
from art_patch.pipeline.cycle_run import Cycle
from art_patch.trajectories import why_untrainable
from art_patch.types import Call, Group, Policy

_GIVE_UP_AFTER = 3
"""So many turns in a row that the engine failed, and the rest waits for the next cycle."""


def resample(run: Cycle, champion: Policy, grouping: Grouping) -> None:
    """Answer turns of these runs again, and keep the groups as they come.

    The engine's failures end it early and not the cycle: what waits is asked again by the next one.

    Args:
        run: the cycle.
        champion: who answers.
        grouping: what became of the runs; those without siblings are asked.
    """
    config = run.config.resample
    if config is None:
        return
    metrics: Counter[str] = Counter()
    lonely = [*grouping.waiting, *grouping.others]
    found: dict[str, Any] = {"runs": len(lonely)}
    run.metrics["resample"] = found
    if not is_open(config.window, datetime.now()):
        found["left"] = {f"outside of {config.window}": len(lonely)}
        return
    named = run.store.corrections([trajectory.id for trajectory in lonely])
    corrected = {key: its[-1].call_id for key, its in named.items() if its and its[-1].call_id}
    turns, left = choose_turns(lonely, config, keys=grouping.keys, corrected=corrected)
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
                    pace.stop()
                    left[f"the engine failed: {reason}"] = len(turns) - done
            else:
                failed = 0
                if alternatives:
                    metrics["samples"] += len(alternatives)
                    metrics["turns"] += 1
                    metrics["groups"] += _keep(run, turn, alternatives)
                    if turn.trajectory.id not in asked_again:
                        asked_again.add(turn.trajectory.id)
                        _note_source(run, turn)
            try:
                run.progress("resample", done, len(turns), f"{metrics['groups']} groups")
            except BaseException:
                pace.stop()  # what waits is asked by the next cycle
                raise
    found |= {"turns": metrics["turns"], "samples": metrics["samples"], "groups": metrics["groups"]}
    found |= {name: metrics[name] for name in ("other_prompt", "failed") if metrics[name]}
    found["left"] = left


def is_open(window: str | None, now: datetime) -> bool:
    """Whether the time of day lies in `HH:MM-HH:MM`, which may pass midnight.

    Raises:
        ConfigError: the window is not of that form.
    """
    if window is None:
        return True
    try:
        begin, end = (datetime.strptime(part.strip(), "%H:%M").time() for part in window.split("-"))
    except ValueError:
        raise ConfigError(f"{window!r} is no window of the day; write it like 22:00-06:00") from None
    at = now.time()
    return begin <= at < end if begin <= end else at >= begin or at < end


def _ask(run: Cycle, champion: Policy, turn: ResampleTurn, config: ResampleConfig, pace: _Pace) -> list[Call]:
    """Return one call for each further answer; empty if there is no more time."""
    if not pace.wait():
        return []
    given = turn.call.params.get("temperature")
    temperature = given if isinstance(given, int | float) and given >= 0.01 else config.temperature
    answers = answer_again(
        run.engine, champion.name, turn.call, config.samples, temperature=temperature, logprobs=True,
        priority=config.priority,
    )  # fmt: skip
    at = time.time()
    made: list[Call] = []
    for choice in answers.choices:
        call = Call(
            id="",
            trajectory_id="",
            started_at=at - answers.duration_ms / 1000,
            duration_ms=answers.duration_ms,
            requested_model=turn.call.requested_model,
            messages=turn.call.messages,
            tools=turn.call.tools,
            choices=(replace(choice, index=0),),
            params={**_limits(turn.call), "temperature": temperature},
            policy=champion.name,
            prompt_token_ids=answers.prompt_token_ids,
            prompt_tokens=len(answers.prompt_token_ids),
            completion_tokens=len(choice.token_ids or ()),
        )
        made.append(replace(call, untrainable=why_untrainable(call)))
    return made


def _limits(call: Call) -> dict[str, object]:
    return {name: call.params[name] for name in ("max_tokens", "max_completion_tokens", "stop") if name in call.params}


def _keep(run: Cycle, turn: ResampleTurn, alternatives: Sequence[Call]) -> bool:
    """Write the turn's group; return whether there is one."""
    group = turn_group(turn, alternatives, new_id=new_id, at=run.now)
    if group is None:
        return False
    run.store.write([record for sibling in group.trajectories for record in (sibling.info, *sibling.calls)])
    run.store.ledger.add_groups([group], now=run.now)
    return True


def _note_source(run: Cycle, turn: ResampleTurn) -> None:
    """Keep the run in a group of its own, so that no later cycle asks it again."""
    source = Group(new_id(), turn.scenario_key, "single", (turn.trajectory,))
    run.store.ledger.add_groups([source], state="resampled", now=run.now)


class _Pace:
    """Lets so many through in a minute, evenly, until it is stopped."""

    def __init__(self, per_minute: float | None) -> None:
        self._every_s = 60 / per_minute if per_minute else 0.0
        self._next = time.monotonic()
        self._lock = Lock()
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def wait(self) -> bool:
        """Return when it is one's turn; `False` if there is none any more."""
        with self._lock:
            mine = max(self._next, time.monotonic())
            self._next = mine + self._every_s
        while not self.stopped and (left := mine - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
        return not self.stopped
