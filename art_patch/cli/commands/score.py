"""`art-patch score`: let the judge rank what waits, without training; or show what it would be sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_patch.cli.options.judging import (
    CheckOption,
    JudgeBaseUrlOption,
    JudgeOption,
    MaxCallsOption,
    MaxUsdOption,
    RubricOption,
    make_judge,
)
from art_patch.cli.options.opening import open_existing
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption

if TYPE_CHECKING:
    from art_patch.rewards import Judge, Plan
    from art_patch.types import Group


def score(
    judge: JudgeOption = None,
    judge_base_url: JudgeBaseUrlOption = None,
    rubric: RubricOption = None,
    max_usd: MaxUsdOption = None,
    max_calls: MaxCallsOption = None,
    check: CheckOption = None,
    settle_s: Annotated[
        float, typer.Option("--settle-s", help="A trajectory is whole when it was silent this long.")
    ] = 60.0,
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", help="Split groups whose prompt is longer.", show_default=False)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the judge would be sent, and send it nothing.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="With --dry-run: the whole prompt of the first group.")] = False,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score the groups that wait. Scores are kept as they come, so it may be stopped and run again at any time.

    Exit codes: 0 scored, nothing to do, or the budget is used up; 5 a cycle is running; 7 the judge failed at all that
    it was asked, also where that used the budget up; 1 and above for other errors.
    """
    from art_patch.cli.options.meaning import make_embed
    from art_patch.cli.views.output import bars
    from art_patch.errors import ConfigError
    from art_patch.pipeline import CycleConfig, Run, project_lock, to_judge
    from art_patch.pipeline import group as group_runs
    from art_patch.pipeline import score as score_groups
    from art_patch.rewards import load_checks, load_combination
    from art_patch.settings import load_settings

    if show and not dry_run:
        raise ConfigError("--show shows what would be sent; give it with --dry-run")
    settings = load_settings(
        project=project, home=home, store=store, judge=judge, judge_base_url=judge_base_url, rubric=rubric,
        checks=tuple(check) if check else None,
    )  # fmt: skip
    chief = make_judge(settings, max_usd=max_usd, max_calls=max_calls, max_prompt_tokens=max_prompt_tokens)
    opened = open_existing(settings)
    config = CycleConfig(
        settle_s=settle_s,
        across=settings.group_across,
        embed=make_embed(settings),
        checks=load_checks(settings.checks),
        combination=load_combination(settings.reward, criteria=settings.criteria),
    )
    with bars(quiet=as_json) as progress:
        run = Run(opened, chief, config, progress, time.time())
        if dry_run:
            _show_plans(chief, settings.judge_base_url, to_judge(run), show=show, as_json=as_json)
        else:
            with project_lock(settings.adapters.parent):
                group_runs(run)
                score_groups(run)
            _say(run.metrics, as_json)
    if unheard := run.metrics.get("group", {}).get("embeddings"):
        typer.echo(f"grouped by words alone: {unheard}", err=True)
    opened.close()


def _say(metrics: dict[str, Any], as_json: bool) -> None:
    from art_patch.cli.views.output import answer
    from art_patch.cli.views.safe_text import one_line

    if as_json:
        answer(metrics)
        return
    done: dict[str, Any] = metrics["score"]
    quarantined: dict[str, int] = done.get("quarantined", {})
    total = done["groups"] + done["unscored"] + sum(quarantined.values())
    if not total:
        typer.echo("no group waits for scores")
        return
    typer.echo(f"scored {done['groups']} of {total} groups" + (f": {_spent(done)}" if "calls" in done else ""))
    for reason, count in done.get("reasons", {}).items():
        typer.echo(f"  {count} not scored, and waiting: {one_line(reason)}")
    for reason, count in quarantined.items():
        typer.echo(f"  {count} quarantined: {one_line(reason)}")
    for alarm in done.get("alarms", ()):
        typer.echo(f"  alarm: {one_line(alarm)}")


def _spent(done: dict[str, Any]) -> str:
    sent, written = done["prompt_tokens"], done["completion_tokens"]
    return f"{done['calls']} calls, {sent:,} tokens sent, {written:,} written, {_usd(done['cost_usd'])}"


def _show_plans(judge: Judge, base_url: str | None, groups: Sequence[Group], *, show: bool, as_json: bool) -> None:
    from art_patch.cli.views.output import answer
    from art_patch.rewards import DefenceConfig

    plans = [judge.plan(group) for group in groups]
    requests = [request for plan in plans for request in plan.requests]
    prices = [request.estimate_usd for request in requests]
    known = [price for price in prices if price is not None]
    estimate_usd = sum(known) if len(known) == len(prices) else None
    defence = DefenceConfig()
    checking = (
        max(2, ceil(defence.planted_share * len(plans))) + ceil(defence.double_share * len(plans)) if plans else 0
    )
    tokens = sum(request.prompt_tokens for request in requests)
    first = next((plan for plan in plans if plan.requests), None) if show else None
    if as_json:
        shown = [_plan_as_json(plan) for plan in plans]
        about = {"sent": False, "judge": judge.model, "base_url": base_url, "rubric": judge.rubric.version}
        sums = {
            "calls": len(requests),
            "checking_calls": checking,
            "prompt_tokens": tokens,
            "estimate_usd": estimate_usd,
            "groups": shown,
        }
        prompts = {"prompts": [list(request.prompt.messages) for request in first.requests]} if first else {}
        answer({**about, **sums, **prompts})
        return
    where = base_url or "its provider's own address"
    typer.echo(f"nothing was sent to judge {judge.model} at {where}, rubric {judge.rubric.version}")
    for plan in plans:
        size = plan.too_long or ", ".join(f"{request.prompt_tokens:,} tokens" for request in plan.requests)
        typer.echo(f"  group {plan.group_id}: {plan.attempts} attempts, {size}")
    typer.echo(
        f"{len(plans)} groups wait: {len(requests)} calls if every answer is valid, {tokens:,} tokens to send, "
        f"about {_usd(estimate_usd)}; up to {checking} calls more to check the judge (planted answers, second looks)"
    )
    for request in first.requests if first else ():
        for message in request.prompt.messages:
            typer.echo(f"\n--- {message['role']} ---\n{message['content']}")


def _plan_as_json(plan: Plan) -> dict[str, Any]:
    return {
        "id": plan.group_id,
        "attempts": plan.attempts,
        "prompt_tokens": [request.prompt_tokens for request in plan.requests],
        "estimate_usd": [request.estimate_usd for request in plan.requests],
        "too_long": plan.too_long,
    }


def _usd(value: float | None) -> str:
    return "an unknown price" if value is None else f"${value:.4f}"
