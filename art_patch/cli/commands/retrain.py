"""`art-patch retrain` runs one cycle; `art-patch score` runs only its first half: grouping and judging, no training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import typer

from art_patch import gate, insights, pipeline, rewards, serving, store, types
from art_patch.cli import output
from art_patch.cli.commands.consent import host_of, tell_once
from art_patch.cli.commands.cycles import in_log, noted, tell_people
from art_patch.cli.logs import Log
from art_patch.cli.options import ActingProject, Judging, Project, make_embed, open_existing
from art_patch.cli.typed_options import Only, Option, command, setting
from art_patch.errors import ConfigError, EngineError, GateRejected
from art_patch.grouping import ReplayConfig, ResampleConfig
from art_patch.pipeline import CycleConfig
from art_patch.recording import REDACTED
from art_patch.settings import Settings
from art_patch.training import LossConfig, Scale, TrainConfig, require_permission
from art_patch.trajectories import transcript

SETTLE_ONLY = Only(("settle_s",))
_COLOURS = {"promoted": "green", "rejected": "yellow", "waits for approval": "cyan", "canary": "cyan"}


@dataclass(frozen=True, slots=True)
class Replays(ReplayConfig):
    """The options of `ReplayConfig`. On the command line the default is no replay: a replay runs the user's code."""

    samples: Annotated[
        int,
        Option(
            "Replays of a run without siblings, by calling your replayable function again; 0 for none. The gate "
            "also replays held-out runs, with both policies.",
            name="replay",
            least=0,
            most=15,
            env=True,
        ),
    ] = 0

    def config(self, settings: Settings) -> ReplayConfig | None:
        """Return the replay settings, with the environment variables of this project; `None` if there is no replay.

        Raises `ConfigError` if no replay is asked for, but where it is to begin.
        """
        if not self.samples and self.begin != "start":
            raise ConfigError("--replay-from says where replays begin; --replay asks for them, such as --replay 3")
        environment = {
            "project": settings.project,
            "home": str(settings.directory.parent),
            # Replays may run in another directory, where a relative path would name another store.
            "store": store.absolute_url(settings.store_url),
        }
        return replace(self, environment=environment) if self.samples else None


@dataclass(frozen=True, slots=True)
class Suite:
    """The options of commands that run a gate: a file of prompts (the suite), and a judge of its own."""

    suite: Annotated[
        Path | None,
        Option("File of prompts that no candidate may get worse at: JSON lines with messages and tools.", env=True),
    ] = None

    gate_judge: Annotated[str | None, setting("gate_judge")] = None
    gate_judge_base_url: Annotated[str | None, setting("gate_judge_base_url")] = None
    gate_rubric: Annotated[str | None, setting("gate_rubric")] = None

    def as_settings(self) -> dict[str, Any]:
        """Return these options as arguments of `load_settings`."""
        return {name: getattr(self, name) for name in ("gate_judge", "gate_judge_base_url", "gate_rubric")}

    def gate_config(self, settings: Settings) -> gate.GateConfig:
        """Return the gate's settings with the prompts of the suite; without prompts if no file was given."""
        least = settings.gate_scenarios
        config = gate.GateConfig(suite=gate.read_suite(self.suite) if self.suite else ())
        return replace(config, min_scenarios=least, max_scenarios=max(least, config.max_scenarios))


@dataclass(frozen=True, slots=True)
class Teaching:
    """The options of a teacher, from which is learned in place of a judge."""

    teacher: Annotated[str | None, setting("teacher")] = None
    teacher_base_url: Annotated[str | None, setting("teacher_base_url")] = None

    def as_settings(self) -> dict[str, Any]:
        """Return these options as arguments of `load_settings`."""
        return {"teacher": self.teacher, "teacher_base_url": self.teacher_base_url}


@command
def retrain(
    *,
    judging: Judging,
    teaching: Teaching,
    replays: Replays,
    resampling: ResampleConfig,
    cycle: CycleConfig,
    idle_only: Annotated[bool, Option("End at once if apps have made calls within --idle-minutes.")] = False,
    idle_minutes: Annotated[float, Option("Minutes without a call after which apps are idle.", least=0.1)] = 5.0,
    train: TrainConfig,
    loss: LossConfig,
    advantage_scale: Annotated[
        Scale | None,
        Option("Spread by which advantages are divided. Default: batch; of the loss dr_grpo none, half of its name."),
    ] = None,
    imitate_models: Annotated[str | None, setting("imitate_models")] = None,
    suite: Suite,
    promotion: Annotated[str | None, setting("promotion")] = None,
    canary_percent: Annotated[float | None, setting("canary_percent")] = None,
    max_loss: Annotated[float | None, setting("max_loss")] = None,
    project: ActingProject,
    log: Log,
) -> None:
    """Run one cycle: group, score, train, gate, promote. While a policy is under test, only continue that test.

    Each cycle writes a report, as JSON and Markdown, to `cycles/` in the project's directory.

    Exit codes: 0 the candidate was promoted, waits for approval or is being tested, the time is up, the apps are not
    idle, or there is nothing to do; 4 the candidate was rejected; 5 another cycle is running, or took over from this
    one; 6 the engine is down; 7 the judge failed; 8 the store cannot be used; 13 the update failed. The docs list all
    codes. A failed cycle never changes which policy serves.
    """
    own: dict[str, Any] = {"promotion": promotion, "canary_percent": canary_percent, "max_loss": max_loss}
    own |= {"imitate_models": imitate_models} | teaching.as_settings()
    settings = project.settings(**judging.as_settings(), **suite.as_settings(), **own)
    if settings.teacher is not None:
        cycle = replace(cycle, min_group_size=1)  # each token is compared with the teacher's, and no run with another
        _require_taught(train, loss, advantage_scale)
    # Dr. GRPO does not divide advantages by the spread of a group's rewards.
    scale = advantage_scale or ("none" if loss.name == "dr_grpo" else "batch")
    train = replace(train, loss=loss, advantage_scale=scale, imitate_models=settings.imitate_models)
    require_permission(train)
    config = replace(
        with_settings(cycle, settings),
        replay=replays.config(settings),
        resample=resampling if resampling.samples else None,
        train=train,
        gate=suite.gate_config(settings),
        promotion=settings.promotion,
        canary_percent=settings.canary_percent,
        canary=insights.canary_config(settings),
        # `None` does not look at the apps at all.
        idle_minutes=idle_minutes if idle_only else None,
        keep_days=settings.keep_days,
        keep_trajectories=settings.keep_trajectories,
        search=settings.search == "on",
    )
    who = project.actor("retrain")
    with noted(settings.directory) as keep:
        opened = open_existing(settings)
        with closing(opened), in_log(opened, settings.project) as note:
            report = _retrain(opened, settings, config, judging, project, who)
            note(report)
            keep(report)
            tell_people(opened, settings, report)
    # Not an error: the report is printed as always, and the exit code tells cron's caller.
    if report.get("outcome") == "rejected":
        raise typer.Exit(GateRejected.exit_code)


def _retrain(
    opened: store.Store, settings: Settings, config: CycleConfig, judging: Judging, project: ActingProject, who: str
) -> dict[str, Any]:
    tell_once(opened, settings, "retrain", as_json=project.as_json)
    # Neither judge nor engine is needed, or asked for, where there is nothing to learn from.
    if (missing := _what_is_missing(opened)) is not None:
        with output.bars(quiet=project.as_json) as progress:
            # A cycle deletes old trajectories at its end; here there will be none.
            pipeline.prune(opened, config, progress, who=who)
        facts: dict[str, Any] = {"outcome": "nothing to do", "reason": missing}
        if not project.answered(facts):
            say_cycle(facts)
        return facts
    judge, gate_judge = judging.limited_judges(settings, max_tokens=config.train.max_tokens)
    engine = serving.EngineClient.of_route(settings, opened.ledger.route())
    if engine is None:
        raise EngineError("no engine is running, so no candidate could be tested; start `art-patch serve` first")
    # An engine that is just starting is given ten seconds.
    engine.wait_ready(timeout_s=10.0)
    with output.bars(quiet=project.as_json) as progress:
        report = pipeline.retrain(
            opened, engine, judge, settings.adapters, config, gate_judge=gate_judge, who=who, progress=progress
        )
    if not project.answered(facts := asdict(report)):
        say_cycle(facts)
    return facts


def _require_taught(train: TrainConfig, loss: LossConfig, advantage_scale: Scale | None) -> None:
    """Raise `ConfigError` if an option is given that has no effect where a teacher is learned from."""
    given = {"--anchor-weight": train.anchor_weight, "--kl": loss.kl_coefficient, "--advantage-scale": advantage_scale}
    if left := [name for name, value in given.items() if value]:
        raise ConfigError(f"each token is learned by its own distance from the teacher; leave out {' and '.join(left)}")


def with_settings(config: CycleConfig, settings: Settings) -> CycleConfig:
    """Return the cycle's configuration, with the project's settings for grouping and scoring added."""
    return replace(
        config,
        across=settings.group_across,
        holdout_users=settings.holdout_users,
        embed=make_embed(settings),
        checks=rewards.load_checks(settings.checks),
        combination=rewards.load_combination(settings.reward, criteria=settings.criteria),
        redact=settings.redact,
    )


def _what_is_missing(opened: store.Store) -> str | None:
    if opened.ledger.leader() is None:
        return pipeline.why_none_serves(opened)
    return None if opened.read.counts()["calls"] else "no calls are recorded yet; run your agent with art_patch.patch()"


def say_cycle(report: dict[str, Any]) -> None:
    """Print a `CycleReport`, given as a dictionary: the outcome, any warning, and a line for each stage."""
    console, metrics = output.stdout(), dict(report.get("metrics") or {})
    colour, who = _COLOURS.get(report["outcome"], "dim"), output.escape(report.get("candidate") or "")
    output.print_reason(console, f"[{colour}]{report['outcome']}[/] {who}".rstrip(), report["reason"])
    # A sentence of its own, because it says that recorded tokens and text do not agree.
    if odd := metrics.pop("round_trips", None):
        console.print(odd["first"], style="yellow", markup=False)
    for stage, values in metrics.items():
        # Long values are in the report on disk.
        shown = pipeline.metrics_line({key: value for key, value in values.items() if key not in pipeline.LONG})
        console.print(output.Text.assemble("  ", (f"{stage:<6}", "dim"), " ", output.one_line(shown)))


@command
def score(
    judging: Judging,
    cycle: Annotated[CycleConfig, SETTLE_ONLY],
    project: Project,
    max_prompt_tokens: Annotated[
        int | None, Option("Split groups whose prompt to the judge has more tokens than this.")
    ] = None,
    dry_run: Annotated[bool, Option("Print the prompts that the judge would get, and send nothing.")] = False,
    show: Annotated[bool, Option("With --dry-run: print the whole prompt of the first group.")] = False,
) -> None:
    """Let the judge score the groups that wait, without training.

    Each score is stored as it arrives, so the command may be stopped and run again at any time.

    Exit codes: 0 scored, nothing to do, or the judge's budget is used up; 5 a cycle is running; 7 every request to the
    judge failed, even if the budget is used up by that; the docs list the codes of other errors.
    """
    if show and not dry_run:
        raise ConfigError("--show shows what would be sent; give it with --dry-run")
    settings = project.settings(**judging.as_settings())
    judge = judging.limited_judge(settings, max_prompt_tokens=max_prompt_tokens)
    opened = open_existing(settings)
    config = with_settings(cycle, settings)
    if dry_run:
        config = replace(config, embed=None)  # which would be sent users' messages, too
    with output.bars(quiet=project.as_json) as progress:
        run = pipeline.Run(opened, judge, config, progress, time.time())
        if dry_run:
            _show_plans(judge, settings, pipeline.to_judge(run), show=show, project=project)
        else:
            # A cycle groups and scores, too: at the same time, both would pay for the same groups.
            with pipeline.project_lock(settings.adapters.parent):
                pipeline.group(run)
                pipeline.score(run)
            if not project.answered(run.metrics):
                _say_scores(run.metrics["score"])
    # On stderr, so that with --json stdout holds one object and no more.
    if unheard := run.metrics.get("group", {}).get("embeddings"):
        typer.echo(f"grouped by words alone: {unheard}", err=True)
    opened.close()


def _say_scores(done: dict[str, Any]) -> None:
    quarantined: dict[str, int] = done.get("quarantined", {})
    total = done["groups"] + done["unscored"] + sum(quarantined.values())
    if not total:
        typer.echo("no group waits for scores")
        return
    spent = ""
    if "calls" in done:
        sent, written = done["prompt_tokens"], done["completion_tokens"]
        spent = f": {done['calls']} calls, {sent:,} tokens sent, {written:,} written, {_usd(done['cost_usd'])}"
    typer.echo(f"scored {done['groups']} of {total} groups{spent}")
    notes = [f"{count} not scored, and waiting: {reason}" for reason, count in done.get("reasons", {}).items()]
    notes += [f"{count} quarantined: {reason}" for reason, count in quarantined.items()]
    notes += [f"alarm: {alarm}" for alarm in done.get("alarms", ())]
    for note in notes:
        typer.echo(f"  {output.one_line(note)}")


def _show_plans(
    judge: rewards.Judge, settings: Settings, groups: Sequence[types.Group], *, show: bool, project: Project
) -> None:
    plans = [judge.plan(group) for group in groups]
    first = next((plan.requests for plan in plans if plan.requests), ()) if show else ()
    facts = _plan_facts(judge, settings, groups, plans)
    prompts = {"prompts": [list(request.prompt.messages) for request in first]} if first else {}
    if project.answered(facts | prompts):
        return
    typer.echo(
        f"nothing was sent to judge {judge.model} at {host_of(facts['base_url'])}, rubric {judge.rubric.version}"
    )
    for plan in plans:
        size = plan.too_long or ", ".join(f"{request.prompt_tokens:,} tokens" for request in plan.requests)
        typer.echo(f"  group {plan.group_id}: {plan.attempts} attempts, {size}")
    typer.echo(
        f"{len(plans)} groups wait: {facts['calls']} calls if every answer is valid, {facts['prompt_tokens']:,} tokens "
        f"to send, about {_usd(facts['estimate_usd'])}; up to {facts['checking_calls']} calls more to check the judge "
        "(planted answers, second looks)"
    )
    typer.echo(
        f"of {facts['runs']} runs: {facts['prompt_messages']} messages of prompts, {facts['answers']} answers and "
        f"{facts['tool_results']} tool results; {facts['characters']:,} characters with the judge's instructions"
    )
    typer.echo(
        f"texts as the apps recorded them; redaction here: {facts['redact'] or 'none'} (ART_PATCH_REDACT), at least "
        f"{facts['redacted_at_least']} of the runs were redacted"
    )
    if settings.embeddings:
        host = host_of(settings.embeddings_base_url)
        typer.echo(f"grouped by words alone here; users' first messages would go to {settings.embeddings} at {host}")
    for request in first:
        for message in request.prompt.messages:
            typer.echo(f"\n--- {message['role']} ---\n{message['content']}")


def _plan_facts(
    judge: rewards.Judge, settings: Settings, groups: Sequence[types.Group], plans: Sequence[rewards.Plan]
) -> dict[str, Any]:
    """Return what the judge would be sent, and at what cost."""
    requests = [request for plan in plans for request in plan.requests]
    prices = [request.estimate_usd for request in requests]
    # `DefenceConfig`: at least two groups are copied with a planted answer, and a share is judged a second time, or
    # without what followed.
    defence = rewards.DefenceConfig()
    planted, double = defence.planted_share * len(plans), defence.double_share * len(plans)
    blind = defence.blind_share * sum(1 for group in groups if group.followed)
    runs = [run for group in groups for run in group.trajectories]
    messages = [message for run in runs for message in transcript(run)]
    return {
        "sent": False,
        "judge": judge.model,
        "base_url": settings.judge_base_url,
        "rubric": judge.rubric.version,
        "calls": len(requests),
        "checking_calls": max(2, ceil(planted)) + ceil(double) + ceil(blind) if plans else 0,
        "characters": sum(len(str(said["content"])) for one in requests for said in one.prompt.messages),
        "runs": len(runs),
        # Of these runs, not of every request: a group that is judged twice is sent twice.
        "answers": sum(message.get("role") == "assistant" for message in messages),
        "tool_results": sum(message.get("role") == "tool" for message in messages),
        "prompt_messages": sum(message.get("role") not in ("assistant", "tool") for message in messages),
        # Apps redact, before they record. Of a call that upstream answered, the store does not tell it.
        "redact": settings.redact if isinstance(settings.redact, str | None) else "function",
        "redacted_at_least": sum(any(call.untrainable == REDACTED for call in run.calls) for run in runs),
        "embeddings": settings.embeddings and {"model": settings.embeddings, "base_url": settings.embeddings_base_url},
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        # One unknown price makes the sum unknown: a sum of the others would look like the whole.
        "estimate_usd": None if None in prices else sum(price for price in prices if price is not None),
        "groups": [
            {
                "id": plan.group_id,
                "attempts": plan.attempts,
                "prompt_tokens": [request.prompt_tokens for request in plan.requests],
                "estimate_usd": [request.estimate_usd for request in plan.requests],
                "too_long": plan.too_long,
            }
            for plan in plans
        ],
    }


def _usd(value: float | None) -> str:
    return "an unknown price" if value is None else f"${value:.4f}"
