"""Commands that only measure: `art-patch analytics`, `groups`, `evaluate`, `reproduce` and `judge test`."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from typing import Annotated, Any

import typer

from art_patch import formats, gate, insights, pipeline, rewards, trackers, training
from art_patch._lib.words import MOST_IDS, the_one
from art_patch.cli import options, output
from art_patch.cli.commands.retrain import SETTLE_ONLY, Replays, Suite
from art_patch.cli.typed_options import Option, command, is_before_subcommand
from art_patch.errors import ConfigError, EngineError, MalformedFile, NotReproducible, OtherWeights
from art_patch.pipeline import CycleConfig
from art_patch.settings import load_settings


@command
def analytics(
    wanted: options.RunFilter,
    project: options.Project,
    success_at: Annotated[float, Option("Smallest reward of a successful run.")] = 0.5,
) -> None:
    """Count how many runs succeeded, how long they took, which tools they called, and how they failed.

    A run that failed with an error counts as not successful, whatever its reward. A run with neither an error nor a
    reward is left out of the success rates.
    """
    chosen = wanted.chosen()
    with project.opened() as (settings, opened):
        options.require_policy(opened, chosen.policy)
        episodes = (episode for page in trackers.pages_of_episodes(opened, chosen) for episode in page)
        found = insights.analyse(episodes, success_at=success_at)
    if not project.answered({"project": settings.project, "success_at": success_at, **asdict(found)}):
        _print_analytics(found)


def _print_analytics(found: insights.Analytics) -> None:
    console = output.stdout()
    if not found.overall.runs:
        console.print("no run matches; `art-patch trajectories list` shows what there is")
        return
    numbers = ("runs", "failed", "judged", "success", "reward", "calls a run")
    outcomes = output.table("answered by", *numbers, right=numbers)
    for name, one in {"all": found.overall, **found.by_policy}.items():
        rate, means = _number(one.success_rate, ".0%", "unknown"), (one.mean_reward, one.mean_steps)
        shown = (_number(value, ".2f", "unknown") for value in means)
        outcomes.add_row(name, *map(str, (one.runs, one.failed, one.judged)), rate, *shown)
    console.print(outcomes)
    for title, last, rows in (
        ("tool", "share", [(one.name, one.times, one.runs, f"{one.share:.0%}") for one in found.actions]),
        ("error", "newest", [(one.pattern, one.times, one.runs, output.visible(one.example)) for one in found.errors]),
    ):
        if rows:
            table = output.table(title, "times", "runs", last, right=("times", "runs", last))
            for text, *counts in rows:
                table.add_row(output.cell(text), *map(str, counts))
            console.print()
            console.print(table)


_NOT_JUDGED = ("formed", "quarantined")  # states of a group whose scores do not count


@command
def groups(
    context: typer.Context,
    cycle: Annotated[CycleConfig, SETTLE_ONLY],
    project: options.Project,
    min_size: Annotated[
        int | None, Option("Siblings that a group needs. Default: as many as `retrain` needs.", least=2)
    ] = None,
    limit: Annotated[int, Option("Number of waiting runs to look at, oldest first.", least=1)] = 10_000,
) -> None:
    """Show which share of the traffic can be learned from in groups, and how siblings were found. Changes nothing.

    Runs without a group are grouped as `retrain` would group them. If the settings name an embedding model, it is
    called for that.
    """
    if is_before_subcommand(context):
        return
    size = cycle.min_group_size if min_size is None else min_size
    with project.opened() as (settings, opened):
        ours = {"across": settings.group_across, "holdout_users": settings.holdout_users}
        config = replace(cycle, **ours, embed=options.make_embed(settings), min_group_size=size)
        stats, refused = opened.reports.groups(), opened.consent.left_out()
        pending = opened.read.ungrouped(settled_before=time.time() - config.settle_s, limit=limit)
        grouping = pipeline.form(pending, config, opened, map(str, count()).__next__)
    would = dict.fromkeys(insights.WAYS, 0)
    for group in grouping.groups:
        # Attempts within a run are counted by run, below: one run may hold several such groups.
        if group.how != "sibling_spans":
            would[group.how] += len(group.trajectories)
    left = dict(grouping.left)
    would["sibling_spans"] = left.pop("its spans are siblings", 0)
    ways = {
        way: {"groups": stats.ways.get(way, 0), "runs": stats.runs.get(way, 0), "would_be": would[way]}
        for way in insights.WAYS
    }
    judged = sum(number for state, number in stats.states.items() if state not in _NOT_JUDGED)
    standing, more = sum(stats.runs.values()), sum(would.values())
    known = standing + len(pending)
    facts: dict[str, Any] = {
        "runs": stats.all_runs,
        "in_groups": standing,
        "would_be_grouped": more,
        "groupable_share": (standing + more) / known if known else None,  # of those that were looked at
        "looked_at": len(pending),
        "ways": {way: counts for way, counts in ways.items() if any(counts.values())},
        "left": left,
        "not_learned_from": refused,
        "embeddings": grouping.embeddings,
        "groups": sum(stats.states.values()),
        "states": dict(stats.states),
        "held_out": stats.held_out,
        "sizes": dict(stats.sizes),
        "dead_share": stats.states.get("dead", 0) / judged if judged else None,
    }
    if not project.answered(facts):
        _print_groups(facts, limit)


def _print_groups(facts: dict[str, Any], limit: int) -> None:
    console, runs = output.stdout(), facts["runs"]
    if not runs:
        console.print("no trajectories are recorded yet; run your agent with art_patch.patch()")
        return
    summary = output.grid("dim", "")
    beyond = runs - facts["in_groups"] - facts["looked_at"] - sum(facts["not_learned_from"].values())
    known, share = facts["in_groups"] + facts["looked_at"], facts["groupable_share"]
    told = "not known yet" if share is None else f"[b]{share:.0%}[/] of {known} runs"
    more = "; --limit looks at more" if facts["looked_at"] == limit else ": they may still go on"
    summary.add_row("groupable", told + (f"; {beyond} were not looked at{more}" if beyond > 0 else ""))
    states = output.listed([f"{number} {state}" for state, number in facts["states"].items()], "none yet")
    summary.add_row("groups", states + (f"; {facts['held_out']} held out for the gate" if facts["held_out"] else ""))
    if facts["dead_share"] is not None:
        why = "all siblings that are trained were scored alike"
        summary.add_row("dead", f"{facts['dead_share']:.0%} of those that were judged: {why}")
    if facts["sizes"]:
        summary.add_row("sizes", ", ".join(f"{number} of {size}" for size, number in facts["sizes"].items()))
    console.print(summary)
    if facts["ways"]:
        numbers = ("runs", "share", "more now")
        table = output.table("siblings by", *numbers, "", right=numbers, whole=numbers, padding=(0, 2, 0, 0))
        table.pad_edge, table.columns[-1].style = False, "dim"
        for way, counts in facts["ways"].items():
            both = counts["runs"] + counts["would_be"]
            part = f"{both / known:.0%}" if known else "-"
            table.add_row(way, str(counts["runs"]), part, str(counts["would_be"]), insights.WAYS[way])
        console.print()
        console.print(table)
    for reason, number in facts["not_learned_from"].items():
        console.print(f"{number} not learned from: {reason}", markup=False, style="dim")
    if facts["left"]:
        console.print()
        for reason, number in sorted(facts["left"].items(), key=lambda item: -item[1]):
            console.print(f"{number} left: {reason}", markup=False, style="dim")
    if facts["embeddings"]:
        console.print(f"\ngrouped by words alone: {facts['embeddings']}", markup=False, style="dim")


@command
def show_group(
    group: Annotated[str, typer.Argument(help="Id of the group, or a beginning of it that no other id has.")],
    project: options.Project,
) -> None:
    """Show one group: its siblings with their rewards, the judge's words, and why it is dead or quarantined.

    Exit codes: 0 shown; 2 several ids begin so; 19 there is no such group.
    """
    with project.opened() as (_, opened):
        found = {each.id: each for each in opened.browse.groups_like(group, limit=MOST_IDS)} if group else {}
        one = found[the_one(group, list(found), "group", listed_by="art-patch trajectories list --json")]
        facts = insights.group_facts(opened, one)
    if not project.answered(facts):
        _print_group(facts)


def _print_group(facts: dict[str, Any]) -> None:
    console, grid = output.stdout(), output.grid("dim", "")

    def row(name: str, words: str) -> None:
        grid.add_row(name, output.cell(words))

    console.print(output.Text(f"group {output.one_line(facts['id'])}", style="bold"))
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["created_at"]))
    row("state", f"{facts['state']}: {insights.state_in_words(facts['state'])}")
    if facts["reason"]:
        row("why", facts["reason"])
    row("scenario", facts["scenario_key"])
    row("held out", "yes: for the gate only, never learned from" if facts["held_out"] else "no")
    row("siblings by", f"{facts['how']}: {insights.way_in_words(facts['how'])}; formed {made}")
    row("learned by", output.listed(facts["trained"], "no policy"))
    for each in facts["judgements"]:
        why = f": {each['reason']}" if each["reason"] else ""
        row("judged", f"{each['judge']}, rubric {each['rubric']}, for {each['purpose']}: {each['state']}{why}")
    console.print(grid)
    if not facts["siblings"]:
        console.print("\nnone of its runs is in the store: they were erased, or moved to another group")
    for run in insights.best_first(facts["siblings"]):
        reward = "no reward" if run["reward"] is None else f"reward {run['reward']:.2f}"
        failed = ", failed" if run["status"] == "error" else ""
        by = output.listed([output.one_line(name) for name in run["policies"]], "nobody")
        console.print()
        console.print(output.Text(output.one_line(run["id"]), style="bold"))
        calls = output.counted(run["calls"], "call", "calls")
        lines = [f"{reward}{failed}, answered by {by}, {calls}: {run['opening']}"]
        for score in run["scores"]:
            words = score["comment"] or "without words"
            lines.append(f"{score['name']} {score['value']:.2f} ({score['source']}): {words}")
        output.print_below(console, *lines)


@command
def evaluate(
    policy: Annotated[str, typer.Argument(help="NAME@STEP of a policy in any state.")],
    judging: options.Judging,
    replays: Replays,
    suite: Suite,
    project: options.ActingProject,
    against: Annotated[str | None, Option("Policy to compare with. Default: the champion.")] = None,
) -> None:
    """Compare two policies on held-out scenarios with the judge, as the gate does. No policy is promoted or rejected.

    The engine must be up. It loads a policy that it does not serve yet, and unloads it after the comparison. The
    scenarios are the held-out ones that `art-patch score` or `art-patch retrain` found in the traffic. The comparison
    asks for as many answers and judge scores as a gate.

    Exit codes: 0 compared, whatever the result; 2 a setting is wrong; 5 a cycle is running; 6 the engine is down; 7 the
    judge failed; 19 there is no such policy; 11 the policy cannot be served.
    """
    with project.opened(**judging.as_settings(), **suite.as_settings()) as (settings, opened):
        config = CycleConfig(
            replay=replays.config(settings),
            checks=rewards.load_checks(settings.checks),
            combination=rewards.load_combination(settings.reward, criteria=settings.criteria),
            gate=suite.gate_config(settings),
        )
        judge, gate_judge = judging.limited_judges(settings)
        engine = pipeline.find_engine(settings, opened.ledger)
        if engine is None:
            raise EngineError("no engine is running, so nobody can be asked; start `art-patch serve` and try again")
        with output.bars(quiet=project.as_json) as progress:
            other, verdict = pipeline.evaluate(
                opened, engine, judge, settings.adapters, config, policy, against, gate_judge=gate_judge,
                who=project.actor("evaluate"), progress=progress,
            )  # fmt: skip
    facts: dict[str, Any] = {"policy": policy, "against": other, "better": verdict.promote, "reason": verdict.reason}
    facts["metrics"] = dict(verdict.metrics)
    if not project.answered(facts):
        say_comparison(facts)


def say_comparison(facts: dict[str, Any]) -> None:
    """Print which policy is better, the metrics of the held-out scenarios, and the result of each check of the gate."""
    policy, other, metrics = facts["policy"], facts["against"], facts["metrics"]
    colour, word = ("green", "is better than") if facts["better"] else ("yellow", "is not shown to be better than")
    output.stdout().print(f"[b]{policy}[/] [{colour}]{word}[/] [b]{other}[/]", soft_wrap=True)
    output.print_below(output.stdout(), *output.sentences(facts["reason"]))
    rows = [("held-out scenarios", f"{metrics['scenarios']}, {metrics['turns']} turns or runs")]
    if "difference" in metrics:  # a gate that had too little to compare measured none
        rows += [
            (policy, f"{metrics['candidate']:.3f}"),
            (other, f"{metrics['champion']:.3f}"),
            ("difference", f"{metrics['difference']:+.3f}"),
            ("at least", f"{metrics['lower_bound']:+.3f}, wrong at most {gate.once_in(metrics['config']['level'])}"),
        ]
    if metrics["judge"] is not None:
        rows.append(("judge", f"{metrics['judge']}, rubric {metrics['rubric']}, {metrics['judge_calls']} calls"))
    for name, value in rows:
        output.say(f"  {name:<22} {value}")
    for row in metrics["checks"]:
        output.say(f"  {'passed' if row['passed'] else 'FAILED':<7} {row['words']}")
    output.stdout().print("nobody was promoted or rejected")


@command
def reproduce(
    policy: Annotated[str, typer.Argument(help="NAME@STEP of a policy in any state.")],
    project: options.Project,
    anyway: Annotated[bool, Option("Make it also if packages or the device are not those of then.")] = False,
) -> None:
    """Make the update of a policy again from the store, and compare the weights; or say why that is not possible.

    Needs no engine, and takes as long as the update did. Nothing is published: the new weights are deleted. Runs of
    which data was erased are named by their digests in the policy's manifest.

    Exit codes: 0 no weight differs by more than 1e-6; 20 it cannot be made again; 21 the weights differ; 19 there is no
    such policy; 5 another one is being made again; 13 the update failed.
    """
    training.require_packages()
    with project.opened() as (settings, opened), output.bars(quiet=project.as_json) as progress:
        shown = partial(progress, "train")
        found = pipeline.reproduce(opened, settings.adapters, policy, anyway=anyway, progress=shown)
    if not project.answered(asdict(found) | {"equal": found.equal, "tolerance": pipeline.TOLERANCE}):
        _say_reproduced(found)
    if not found.equal:
        raise typer.Exit((NotReproducible if found.equal is None else OtherWeights).exit_code)


def _say_reproduced(found: pipeline.Reproduction) -> None:
    console = output.stdout()
    if found.largest_difference is None:
        console.print(f"[b]{output.escape(found.policy)}[/] cannot be made again:")
        for why in found.why_not.values():
            output.print_below(console, why)
        for kind, digests in found.runs_missing.items():
            output.print_below(console, f"{kind}, by the digests in the manifest: {', '.join(digests)}")
        return
    data = f"{output.counted(found.groups, 'group', 'groups')} with {output.counted(found.runs, 'run', 'runs')}"
    said = "the weights are equal" if found.equal else "the weights are [b]not equal[/]"
    console.print(f"[b]{output.escape(found.policy)}[/] was made again in {output.seconds(found.took_s)}: {said}")
    output.print_below(
        console,
        f"the largest difference of {found.weights:,} weights is {found.largest_difference:.3g}; up to "
        f"{pipeline.TOLERANCE:g} counts as equal",
        f"it learned from {data}",
        *(f"{key} was {then}, and is {now} here" for key, (then, now) in found.made_with.items()),
    )


@command
def judge_test(
    model: options.JudgeModel,
    out: options.Output,
    file: Annotated[str | None, typer.Argument(help="Labelled groups as JSON lines; `-` is stdin.")] = None,
    builtin: Annotated[bool, Option("Use the twelve labelled groups that art_patch contains.")] = False,
) -> None:
    """Measure a judge on groups whose order people have decided, before anything is learned from its scores.

    A line of the file is one group: {"task": "...", "attempts": [{"messages": [...], "label": 0..1}, ...]}. A group may
    have `messages` in place of `task`, for a prompt of several messages, and `tools`, the tools that were offered. An
    attempt may have `rank` in place of `label`; rank 1 is the best. The judge is asked about four times for each group.

    Exit codes: 0 measured, whatever the result; 2 a setting is wrong; 7 the judge failed; 15 a line is wrong, and
    nothing was sent.
    """
    if (file is None) != builtin:
        raise ConfigError("name a file of labelled groups, or --builtin for ours; one of both")
    settings = load_settings(**model.as_settings())
    # Before the judge is made: a wrong line must cost nothing.
    labelled = _read(file or str(rewards.BUILTIN))
    tested = options.make_judge(settings)
    with output.bars(quiet=out.as_json) as progress:
        metrics = rewards.measure(labelled, tested, progress=progress.counts("judge"))
    if not out.answered({"judge": tested.model, "rubric": tested.rubric.version, **asdict(metrics)}):
        _print_metrics(tested.model, metrics)


def _read(file: str) -> list[rewards.Labelled]:
    name = "stdin" if file == formats.STREAM else file
    labelled: list[rewards.Labelled] = []
    with formats.reading(file) as rows:
        for place, row in rows():
            try:
                labelled.append(rewards.read_labelled(row, place))
            except MalformedFile as error:
                raise MalformedFile(f"{name}, {place}: {error}; nothing was sent") from None
    if not any(len(set(each.labels.values())) > 1 for each in labelled):
        raise MalformedFile(
            f"{name} has no group whose attempts are labelled differently, so there is nothing to compare with; "
            "give better attempts higher labels; nothing was sent"
        )
    return labelled


def _print_metrics(model: str, metrics: rewards.JudgeMetrics) -> None:
    share = output.share
    rows = (
        ("agrees with the labels", share(metrics.pairwise_accuracy), f"of {metrics.pairs} pairs; by chance 50 %"),
        ("Kendall's tau", _number(metrics.kendall_tau), "1 the same order, 0 chance, -1 the reverse"),
        ("shown first, an attempt gets", _number(metrics.position_bias, "+.3f"), "more; 0 is fair"),
        ("turned around by the order", share(metrics.flips), "of all pairs; 0 % is fair"),
        ("differs by order", _number(metrics.order_difference), f"asked again: {_number(metrics.repeat_difference)}"),
        ("agrees with itself", share(metrics.self_consistency), "of all pairs, asked twice in one order"),
        ("resists pleas", share(metrics.resisted), f"of {metrics.injections} copies that talk to the judge"),
    )
    console = output.stdout()
    console.print(f"{output.one_line(model)}: {metrics.groups} groups judged", markup=False)
    table = output.grid("", "bold", "dim")
    # Numbers are read from the right.
    table.columns[1].justify, table.columns[1].no_wrap = "right", True
    for row in rows:
        table.add_row(*row)
    console.print(table)
    cost = "unknown price" if metrics.cost_usd is None else f"{metrics.cost_usd:.4f} USD"
    tokens = f"{metrics.prompt_tokens} + {metrics.completion_tokens} tokens"
    console.print(f"{metrics.calls} calls, {tokens}, {cost}")
    for place, reason in metrics.unscored.items():
        console.print(output.cell(f"not judged: {place}: {reason}", style="yellow"))


def _number(value: float | None, form: str = ".3f", unknown: str = "-") -> str:
    return unknown if value is None else f"{value:{form}}"
