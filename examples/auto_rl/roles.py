"""Who writes the scenarios, who judges, and who learns: what the command line names, else their stand-ins.

The helper is any OpenAI-compatible model; its key comes from `OPENAI_API_KEY`. The judge is named as litellm names it
(`openai/gpt-5-mini`, `hosted_vllm/NAME`), and litellm finds its key in the environment. Stand-ins know one task: a task
of your own needs all three real.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from openai import AsyncOpenAI
from scenarios import Scenarios, write_scenarios
from stand_in import STAND_IN_HELPER, TASK, serve_helper, serve_judge, tiny

import art_patch as art
from art_patch.demo.example_script import shared_options
from art_patch.demo.judge import STAND_IN_MODEL
from art_patch.rewards import ruler_score_group

NAME = "auto_rl"

_RUBRIC = """\
The task of the assistant, in its owner's words: {task}

Score how well each answer does exactly this, for whoever sent the message. The owner's words decide what is good: what
they ask for earns, and what they do not ask for earns nothing. An answer that is off the point, invents facts or is cut
off is a bad one. Clear differences deserve clear gaps, answers of equal worth deserve equal scores.
"""

Judge = Callable[[art.TrajectoryGroup], Awaitable[art.TrajectoryGroup | None]]
"""Scores the siblings of a group against each other."""


@dataclass(frozen=True)
class Roles:
    """Where the helper and the judge are reached."""

    helper: str
    helper_url: str | None
    judge: str
    judge_url: str | None

    def judged(self, task: str, *, may_fail: bool) -> Judge:
        """RULER with the task for its rubric; with `may_fail` a group that the judge fails at is left out."""

        async def score(group: art.TrajectoryGroup) -> art.TrajectoryGroup | None:
            return await ruler_score_group(
                group,
                self.judge,
                rubric=_RUBRIC.format(task=task),
                base_url=self.judge_url,
                swallow_exceptions=may_fail,
            )

        return score


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what training and evaluation both have to know."""
    parser.add_argument("--task", default=TASK, help="what the agent is for, in a sentence (%(default)s)")
    parser.add_argument("--count", type=int, default=80, help="scenarios (%(default)s)")
    parser.add_argument("--scenarios", type=Path, help="file that keeps them; in --path, or here, unless given")
    parser.add_argument("--write-prompt", action="store_true", help="let the helper write the system prompt, too")
    parser.add_argument("--helper-model", help="that writes the scenarios; a stand-in unless given")
    parser.add_argument("--helper-base-url", help="address of the helper where it is not OpenAI's")
    parser.add_argument("--judge", help="that ranks answers, as litellm names it; a stand-in unless given")
    parser.add_argument("--judge-base-url", help="address of the judge where it is not the provider's own")
    shared_options(parser)


@contextmanager
def roles(asked: argparse.Namespace) -> Generator[Roles]:
    """Reach the helper and the judge while the block runs, stand-ins where none is named.

    Raises:
        SystemExit: a task that no stand-in knows.
    """
    missing = [
        option
        for option, given in (
            ("--helper-model", asked.helper_model),
            ("--judge", asked.judge),
            ("--base-model", asked.base_model),
        )
        if not given
    ]
    if asked.task != TASK and missing:
        raise SystemExit(f"stand-ins know one task, {TASK!r}; for another one name {', '.join(missing)}, too")
    with ExitStack() as stack:
        yield Roles(
            helper=asked.helper_model or STAND_IN_HELPER,
            helper_url=asked.helper_base_url if asked.helper_model else stack.enter_context(serve_helper()),
            judge=asked.judge or STAND_IN_MODEL,
            judge_url=asked.judge_base_url if asked.judge else stack.enter_context(serve_judge()),
        )


async def scenarios_of(asked: argparse.Namespace, who: Roles) -> Scenarios:
    """The task's scenarios, written if they are not there yet."""
    key = os.environ.get("OPENAI_API_KEY") if asked.helper_model else None  # the stand-in is sent no key
    client = AsyncOpenAI(base_url=who.helper_url, api_key=key or "none")
    file = asked.scenarios or Path(asked.path or ".") / f"scenarios-{_digest(asked, who)}.json"
    return await write_scenarios(
        client, who.helper, asked.task, count=asked.count, file=file, own_prompt=asked.write_prompt
    )


def learner(asked: argparse.Namespace, who: Roles, scenarios: Scenarios) -> art.TrainableModel:
    """The model that learns; each task has a project of its own."""
    base = asked.base_model or str(tiny(asked.seed, scenarios.system_prompt, scenarios.to_learn_from()))
    return art.TrainableModel(name=NAME, project=f"{NAME}-{_digest(asked, who)}-{asked.seed}", base_model=base)


def _digest(asked: argparse.Namespace, who: Roles) -> str:
    told = f"{asked.task}|{who.helper}|{asked.write_prompt}"
    return hashlib.sha256(told.encode()).hexdigest()[:8]
