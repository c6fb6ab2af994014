"""Commands about which policy serves: `promote`, `reject`, `rollback`, `policies`, `watch`; and threads of `serve`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from threading import Event, Thread
from typing import Annotated, Any

import typer

from art_patch import insights, notifications, pipeline, serving, store, types
from art_patch.cli import output
from art_patch.cli.followers import DryRun, Wait, followed, warn_if_rejected_there, warn_if_worse
from art_patch.cli.logs import Log
from art_patch.cli.options import ActingProject, Project, open_existing
from art_patch.cli.typed_options import Option, command, is_before_subcommand
from art_patch.errors import ArtPatchError, GateRejected
from art_patch.settings import Settings

log = logging.getLogger("art_patch.serve")

REASON = Option("Reason, for the ledger.")
_THREADS = "art_patch-"
UPKEEP = f"{_THREADS}upkeep"
"""Name of the thread that keeps a server ready, and leaves the route to another one at the end."""
_AGAIN_S = 5.0  # seconds until a thread of the server that failed begins again
POLICY = typer.Argument(help="NAME@STEP of a candidate, of a policy being tested, or of a retired policy.")


@command
def promote(
    policy: Annotated[str, POLICY],
    project: ActingProject,
    wait: Wait,
    dry: DryRun,
    canary: Annotated[
        float | None,
        Option(
            "Test the policy on this share of the sessions. For a canary: change its share; the test goes on.",
            metavar="PERCENT",
        ),
    ] = None,
    shadow: Annotated[
        bool, Option("Test the policy in the background: it gets copies of calls; its answers are only recorded.")
    ] = False,
    reason: Annotated[str | None, Option("Reason, for the ledger. Default: promoted, or tested, by hand.")] = None,
) -> None:
    """Make a policy the champion, or test it beside the champion, without the gate.

    The engine must be up: it loads and checks the policy first. Only changing the share of a canary needs no engine.
    One policy is tested at a time; `art-patch rollback` ends the test and rejects that policy. A retired policy may be
    tested again; to make one serve without a test, go back to it with `art-patch rollback --to`.
    """
    with project.opened() as (settings, opened):
        done = pipeline.promote_named(
            settings, opened.ledger, policy, percent=canary, shadow=shadow, who=project.actor("promote"),
            reason=reason, dry_run=dry.dry_run,
        )  # fmt: skip
        following = followed(opened, settings, wait=wait, dry=dry)
        rival = done.before or types.UPSTREAM_ARM
        rewards = insights.own_rewards(opened, rival, policy, now=time.time()) if done.state == "champion" else {}
    facts = {"champion": done.champion, "policy": policy, "state": done.state, "percent": canary}
    facts |= {"control_percent": done.control_percent, "rewards": rewards}
    if project.answered(facts | following.facts()):
        return following.end()
    said = insights.promoted_in_words(done)
    output.stdout().print(f"{dry.head}[b]{policy}[/] {said}; {following.words()}", soft_wrap=True)
    warn_if_worse(rewards, rival, policy)
    warn_if_rejected_there(done.policy)
    following.end()


@command
def reject(
    policy: Annotated[str, POLICY], reason: Annotated[str, REASON], project: ActingProject, wait: Wait, dry: DryRun
) -> None:
    """Reject a policy for good. It never serves again; if it is being tested, the test ends.

    It also works while the engine is down; a running engine unloads the policy. The champion cannot be rejected: run
    `art-patch rollback` first.

    Exit codes: 0 rejected; 19 there is no such policy; 14 it is the champion, or rejected already.
    """
    with project.opened() as (settings, opened):
        who = project.actor("reject")
        done = pipeline.reject_named(settings, opened.ledger, policy, who=who, reason=reason, dry_run=dry.dry_run)
        following = followed(opened, settings, wait=wait, dry=dry)
    facts = {"champion": done.champion, "rejected": policy, "was": done.was, "unloaded": done.unloaded}
    if project.answered(facts | following.facts()):
        return following.end()
    rest = "the engine unloaded it" if done.unloaded else "the engine did not have to unload it"
    if dry.dry_run:
        rest = "a running engine unloads it"
    output.stdout().print(
        f"{dry.head}{policy} is rejected for good, was {done.was}; [b]{done.champion or 'upstream'}[/] serves; {rest}; "
        f"{following.words()}",
        soft_wrap=True,
    )
    following.end()


@command
def rollback(
    project: ActingProject,
    wait: Wait,
    dry: DryRun,
    to: Annotated[
        str | None,
        Option(
            "Who answers then: an earlier champion, or `upstream`; a test that is running ends as well. Default: end "
            "the test if there is one, else the champion before.",
            metavar="NAME@STEP|upstream",
        ),
    ] = None,
    reason: Annotated[str, REASON] = "rolled back by hand",
) -> None:
    """Reject the policy that is being tested. If none is being tested, make the previous champion serve again.

    Beside upstream, a policy that is tested is not rejected but learns on. One that was retired before its test is
    retired again. If the champion has taken upstream's place,
    upstream answers again, and the policy learns on.

    It also works while the engine is down. If upstream answers already, or whoever is named, there is nothing to do;
    one goes from upstream to an earlier champion by its name.

    Exit codes: 0 they answer, or answered already; 19 there is no such policy, or no champion before this one; 14 that
    policy never served, or was rejected.
    """
    with project.opened() as (settings, opened):
        who = project.actor("rollback")
        done = pipeline.roll_back(settings, opened.ledger, to=to, who=who, reason=reason, dry_run=dry.dry_run)
        target, before, ended = done.target, done.before, done.test_ended
        following = followed(opened, settings, wait=wait, dry=dry)
        if not project.as_json:
            is_now, serves = insights.rolled_back_in_words(done)
            told = (is_now, serves, following.words())
            output.say(dry.head + "; ".join(filter(None, told)))
        # Last, because reading the calls of a month takes seconds on a large store.
        rewards = insights.own_rewards(opened, before, target, now=time.time()) if target != before else {}
        facts: dict[str, Any] = {"champion": None if target == types.UPSTREAM_ARM else target}
        facts |= {"test_ended": ended, "rejected": ended if done.state == "rejected" else None}
        facts |= {"was": before, "rewards": rewards} | following.facts()
        if not project.answered(facts):
            warn_if_worse(rewards, before, target)
    following.end()


@command
def policies(context: typer.Context, project: Project) -> None:
    """List all policies: state, parent, age, result of the gate, and share of the sessions."""
    if is_before_subcommand(context):
        return
    with project.opened() as (_, opened):
        found, route = opened.ledger.policies(), opened.ledger.route()
    told = [asdict(each) | {"percent": insights.percent_of(each, route)} for each in found]
    if not project.answered({"policies": told}):
        _print_policies(found, route, time.time())


@command
def show_policy(
    policy: Annotated[str, typer.Argument(help="NAME@STEP of a policy in any state.")], project: Project
) -> None:
    """Show where a policy comes from: parents, data, judge, settings, gate, time served, and what became of it.

    `--json` also has the ids of the groups and runs that it learned from, all settings and all metrics.

    Exit codes: 0 shown; 19 there is no such policy.
    """
    with project.opened() as (_, opened):
        now = time.time()
        story = insights.story_of(opened, policy, now=now)
    if project.answered(story.facts):
        return
    console, grid = output.stdout(), output.grid("dim", "")
    console.print(f"[b]{output.escape(story.policy.name)}[/] {story.policy.state}")
    for name, words in story.rows(now):
        grid.add_row(name, output.Text(output.visible(words)))
    console.print(grid)
    console.print()
    for move in reversed(story.history):
        change = f"{move['from_state'] or 'new'} -> {move['to_state']}"
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(move["at"]))
        console.print(output.Text(f"{at}  {change}, by {output.one_line(move['who'])}"))
        output.print_below(console, *output.sentences(move["reason"]))


@command
def watch(
    project: ActingProject,
    once: Annotated[bool, Option("Look at the test once, and do not wait until it is over.")] = False,
    every: Annotated[float, Option("Seconds between two looks at the test.", least=0.1)] = 5.0,
    act: Annotated[
        bool, Option("Also decide, as a running `art-patch serve` does by itself: promote the policy, or end its test.")
    ] = False,
    *,
    log: Log,
) -> None:
    """Watch the policy that is being tested beside the champion, until its test is over. Changes nothing without --act.

    A running `art-patch serve` decides by itself. With `--json` each look at the test is printed as one line.

    Exit codes: 0 promoted, still being tested, learns on beside upstream, or nothing is tested; 4 rejected.
    """
    settings = project.settings()
    opened, stop = open_existing(settings), Event()
    engine = serving.EngineClient.of_route(settings, opened.ledger.route())
    config, who = insights.canary_config(settings), project.actor("watch")
    seen: list[pipeline.WatchReport] = []
    decisions = pipeline.DecisionLog(opened.ledger)

    def on_report(report: pipeline.WatchReport) -> None:
        if report.outcome == "nothing to watch" and (tested := seen[-1].challenger if seen else report.challenger):
            # Another process, such as `art-patch serve`, has decided between two looks.
            report = _ended(opened, tested)
        # A report is printed when its reason changed; the metrics are printed at the beginning and the end.
        is_over = once or report.outcome != "goes on"
        left = insights.time_left(report, config)
        if not project.answered(asdict(report) | {"time_left": left}):
            _say_look(report, whole=is_over or not seen, news=not seen or report.reason != seen[-1].reason)
            if left is not None and (is_over or not seen):
                output.say(insights.time_left_in_words(left))
        seen.append(report)
        decisions.look()
        if is_over:
            stop.set()

    if once:
        on_report(pipeline.watch_once(opened, engine, config, who=who, act=act))
    else:
        pipeline.watch(opened, engine, config, who=who, act=act, stop=stop, every_s=every, on_report=on_report)
    opened.close()
    if seen[-1].outcome == "rejected":
        raise typer.Exit(GateRejected.exit_code)


def watch_beside(
    settings: Settings,
    engine: serving.EngineClient,
    me: store.Server,
    key_file: Callable[[], str | None],
    *,
    who: str,
    stop: Event,
) -> list[Thread]:
    """Start the threads of a server that watch the canary test, keep the champion loaded, and tell people of decisions.

    They end when `stop` is set. `me` is this server's row in the store. `key_file` writes the server's key to a file
    that apps read, and returns its path.
    """

    def watch(own: store.Store) -> None:
        pipeline.watch(own, engine, insights.canary_config(settings), who=who, stop=stop)

    def upkeep(own: store.Store) -> None:
        def take(before: types.Route) -> bool:
            return own.ledger.set_engine(me.base_url, key_file=key_file(), before=before, who=who)

        follow_s = 4 * settings.poll_interval_s  # more than once, for apps that are busy
        pipeline.ServingUpkeep(own, engine, me, take, follow_s=follow_s, search=settings.search == "on").keep(stop)

    def notify(own: store.Store) -> None:
        notifications.Notifier(settings.notify, settings.project, own).keep(stop)

    def run(job: Callable[[store.Store], None]) -> None:
        while True:
            try:
                # Each thread has a connection of its own, so that neither waits for a transaction of the other.
                with closing(store.open_store(settings.store_url, create=False, project=settings.project)) as own:
                    return job(own)
            # Whatever it is: a server whose thread has ended would answer on, but nobody would end a bad canary's test.
            except Exception as error:
                if stop.is_set():
                    return
                expected = isinstance(error, ArtPatchError)
                why = str(error) if expected else type(error).__name__
                log.warning("the server's %s failed and begins again: %s", job.__name__, why, exc_info=not expected)
            if stop.wait(_AGAIN_S):
                return

    # Daemons, because a look that hangs must not keep the server from ending.
    jobs = (watch, upkeep, *([notify] if settings.notify else []))
    threads = [Thread(target=run, args=(job,), name=f"{_THREADS}{job.__name__}", daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    return threads


def _print_policies(found: tuple[types.Policy, ...], route: types.Route, now: float) -> None:
    if not found:
        output.stdout().print("no policies yet; start `art-patch serve --base MODEL`")
        return
    rows = [("policy", "state", "from", "made", "sessions")]
    for policy in found:
        percent = insights.percent_of(policy, route)
        made, sessions = f"{output.ago(now - policy.created_at)} ago", "" if percent is None else f"{percent:g} %"
        rows.append((policy.name, policy.state, _source(policy), made, sessions))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    console = output.stdout()
    for row, policy in zip(rows, (None, *found), strict=True):
        line = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        style = "dim" if policy is None else "bold" if policy.state == "champion" else ""
        console.print(output.Text(line, style), soft_wrap=True)
        # Below, since beside the rest it would be a column of single words.
        if policy is not None and (gate := policy.metrics.get("gate")):
            output.print_below(console, f"gate: {insights.gate_in_words(gate)}")
        if policy is not None and (by := insights.rejected_there(policy)) is not None:
            output.print_below(console, f"rejected where it comes from, {by}")


def _source(policy: types.Policy) -> str:
    return "imported" if types.IMPORTED in policy.metrics else policy.parent or "the base"


def _ended(opened: store.Store, name: str) -> pipeline.WatchReport:
    """Return the report of a test that another process ended, from the ledger."""
    policy, champion = opened.ledger.policy(name), opened.ledger.champion()
    # The history begins with the newest move, which is the end of the test.
    reason = next((move["reason"] for move in opened.ledger.history() if move["policy"] == name), "no reason was noted")
    ended: dict[str, pipeline.WatchOutcome] = {"champion": "promoted", "learner": "learns"}
    outcome = ended.get(policy.state if policy is not None else "", "rejected")
    return pipeline.WatchReport(outcome, reason, name, champion.name if champion else None)


def _say_look(report: pipeline.WatchReport, *, whole: bool, news: bool) -> None:
    if news or whole:
        name = f"[b]{report.challenger}[/] " if report.challenger else ""
        against = f" against {report.champion or 'upstream'}" if report.state else ""
        output.print_reason(output.stdout(), f"{name}{report.outcome}{against}", report.reason)
    if whole and report.metrics:
        _print_signals(report)


def _print_signals(report: pipeline.WatchReport) -> None:
    columns = (f"{report.challenger}", report.champion or "upstream", "compared", "proof of worse", "of better", "")
    table = output.Table("", *columns, box=None, pad_edge=False)
    for name in ("calls", "sessions", "failed"):
        shown = (str(report.metrics[arm][name]) for arm in ("challenger", "champion"))
        table.add_row(f"{name} calls" if name == "failed" else name, *shown, "", "", "", "")
    for name, signal in report.metrics["signals"].items():
        both = (insights.signal_value(name, signal[arm]) if arm in signal else "" for arm in ("challenger", "champion"))
        # What the bets have won, and what proves it.
        proofs = (
            f"{signal[way]:.3g} of {signal[f'{way}_needed']:.3g}" if way in signal else ""
            for way in ("worse", "better")
        )
        table.add_row(name, *both, str(signal["compared"]), *proofs, signal["says"])
    output.stdout().print(table)
