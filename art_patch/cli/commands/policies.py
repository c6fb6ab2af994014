"""Commands about which policy serves: `promote`, `reject`, `policies`, `watch`; and threads of `serve`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from threading import Event, Thread
from typing import Annotated

import typer

from art_patch import notifications, pipeline, promotion, serving, store, types
from art_patch.cli import output
from art_patch.cli.followers import DryRun, Wait, followed, own_rewards, warn_if_worse
from art_patch.cli.logs import Log
from art_patch.cli.options import ActingProject, Project, open_existing
from art_patch.cli.policy_words import (
    gate_in_words,
    rejected_there,
    signal_value,
    time_left,
    time_left_in_words,
    warn_if_rejected_there,
)
from art_patch.cli.typed_options import Option, command, is_before_subcommand
from art_patch.errors import ArtPatchError, ConfigError, EngineError, GateRejected
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
    if shadow and canary is not None:
        raise ConfigError("--canary and --shadow exclude each other; a shadow can become a canary later")
    if canary is not None and not 0 < canary <= 100:
        raise ConfigError(f"--canary {canary:g} is no share of the sessions; give a percentage above 0 and up to 100")
    with project.opened() as (settings, opened):
        ledger, who = opened.ledger, project.actor("promote")
        state = "shadow" if shadow else "champion" if canary is None else "canary"
        tested, before = state != "champion", ledger.route()
        control = before.control_percent or promotion.control_group_to_come(ledger)
        is_canary = canary is not None and (before.challenger, before.challenger_state) == (policy, "canary")
        chosen = promotion.check_promotion(ledger, policy, state, percent=canary)
        by_hand = ("its share changed" if is_canary else "tested") if tested else "promoted"
        why = reason or f"{by_hand} by hand"
        if is_canary and canary is not None:
            # The engine serves a canary already; only its share in the route changes.
            if not dry.dry_run:
                promotion.change_share(ledger, policy, canary, who=who, reason=why)
        elif (engine := find_engine(settings, ledger)) is None:
            raise EngineError(
                "no engine is running, so the policy cannot be proven; start `art-patch serve` and try again"
            )
        elif dry.dry_run:
            pass  # whether the engine can serve it, only loading it shows
        elif state != "champion":
            promotion.challenge(ledger, engine, policy, state=state, percent=canary, who=who, reason=why)
        else:
            promotion.promote(ledger, engine, policy, who=who, reason=why)
        route, following = ledger.route(), followed(opened, settings, wait=wait, dry=dry)
        champion, rival = policy if state == "champion" else route.champion, before.champion or types.UPSTREAM_ARM
        rewards = {} if tested else own_rewards(opened, rival, policy)
    facts = {"champion": champion, "policy": policy, "state": state, "percent": canary, "control_percent": control}
    facts |= {"rewards": rewards}
    if project.answered(facts | following.facts()):
        return following.end()
    if state == "shadow":
        said = f"is asked in the background what apps ask; {rival} serves"
    elif state == "canary":
        said = f"answers {canary or 0:g} % of the sessions, {rival} all others"
        if control and not before.champion:  # beside a champion the control group stays as it is
            said += f"; if it wins, {control:g} % of the sessions stay with upstream, as a control group"
    else:
        said = "serves"
        if control:
            said += f", but for {control:g} % of the sessions, the control group (`art-patch mode --control`)"
    output.stdout().print(f"{dry.head}[b]{policy}[/] {said}; {following.words()}", soft_wrap=True)
    warn_if_worse(rewards, rival, policy)
    warn_if_rejected_there(chosen)
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
        ledger = opened.ledger
        was, unloaded = promotion.check_promotion(ledger, policy, "rejected").state, False
        if not dry.dry_run:
            # Before the engine is asked, for the same reason as in a rollback.
            promotion.reject(ledger, None, policy, who=project.actor("reject"), reason=reason)
            unloaded = policy not in promotion.wanted(ledger) and unload(settings, ledger, policy)
        route, following = ledger.route(), followed(opened, settings, wait=wait, dry=dry)
    facts = {"champion": route.champion, "rejected": policy, "was": was, "unloaded": unloaded}
    if project.answered(facts | following.facts()):
        return following.end()
    rest = "the engine unloaded it" if unloaded else "the engine did not have to unload it"
    if dry.dry_run:
        rest = "a running engine unloads it"
    output.stdout().print(
        f"{dry.head}{policy} is rejected for good, was {was}; [b]{route.champion or 'upstream'}[/] serves; {rest}; "
        f"{following.words()}",
        soft_wrap=True,
    )
    following.end()


@command
def policies(context: typer.Context, project: Project) -> None:
    """List all policies: state, parent, age, result of the gate, and share of the sessions."""
    if is_before_subcommand(context):
        return
    with project.opened() as (_, opened):
        found, route = opened.ledger.policies(), opened.ledger.route()
    if not project.answered({"policies": [asdict(each) | {"percent": _percent(each, route)} for each in found]}):
        _print_policies(found, route, time.time())


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
    config, who = canary_config(settings), project.actor("watch")
    seen: list[pipeline.WatchReport] = []
    decisions = pipeline.DecisionLog(opened.ledger)

    def on_report(report: pipeline.WatchReport) -> None:
        if report.outcome == "nothing to watch" and (tested := seen[-1].challenger if seen else report.challenger):
            # Another process, such as `art-patch serve`, has decided between two looks.
            report = _ended(opened, tested)
        # A report is printed when its reason changed; the metrics are printed at the beginning and the end.
        is_over = once or report.outcome != "goes on"
        left = time_left(report, config)
        if not project.answered(asdict(report) | {"time_left": left}):
            _say_look(report, whole=is_over or not seen, news=not seen or report.reason != seen[-1].reason)
            if left is not None and (is_over or not seen):
                output.say(time_left_in_words(left))
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


def canary_config(settings: Settings) -> promotion.CanaryConfig:
    """Return the rules of the canary test that the project's settings contain."""
    return promotion.CanaryConfig(
        min_sessions=settings.canary_sessions,
        max_hours=settings.canary_hours,
        margin=settings.canary_margin,
        max_loss=settings.max_loss,
        latency_ratio=settings.canary_latency_ratio,
        rest_s=settings.canary_rest_s,
        silence_s=settings.canary_silence_s,
        ramp=promotion.RAMP if settings.canary_ramp else (),
    )


def find_engine(settings: Settings, ledger: store.Ledger, *, within_s: float = 5.0) -> serving.EngineClient | None:
    """Return a client of the project's engine, or `None` if the engine does not answer within `within_s`."""
    engine = serving.EngineClient.of_route(settings, ledger.route())
    return engine if engine is not None and engine.health(timeout_s=within_s) else None


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
        pipeline.watch(own, engine, canary_config(settings), who=who, stop=stop)

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


def unload(settings: Settings, ledger: store.Ledger, rejected: str) -> bool:
    """Ask the engine to unload a policy that gets no more calls; return whether it did."""
    # Nothing is lost if this fails: the next promotion unloads what is not wanted.
    with suppress(ConfigError, EngineError):
        if (engine := find_engine(settings, ledger)) is not None:
            engine.unload(rejected)
            return True
    return False


def _percent(policy: types.Policy, route: types.Route) -> float | None:
    """Return the percentage of the sessions that a policy answers, or `None` if it answers none."""
    # The champion answers all sessions that the canary does not.
    canary = (route.challenger_percent or 0.0) if route.challenger_state == "canary" else 0.0
    if policy.name == route.champion:
        return 100 - canary
    return canary if canary and policy.name == route.challenger else None


def _print_policies(found: tuple[types.Policy, ...], route: types.Route, now: float) -> None:
    if not found:
        output.stdout().print("no policies yet; start `art-patch serve --base MODEL`")
        return
    rows = [("policy", "state", "from", "made", "sessions")]
    for policy in found:
        percent = _percent(policy, route)
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
            output.print_below(console, f"gate: {gate_in_words(gate)}")
        if policy is not None and (by := rejected_there(policy)) is not None:
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
        both = (signal_value(name, signal[arm]) if arm in signal else "" for arm in ("challenger", "champion"))
        # What the bets have won, and what proves it.
        proofs = (
            f"{signal[way]:.3g} of {signal[f'{way}_needed']:.3g}" if way in signal else ""
            for way in ("worse", "better")
        )
        table.add_row(name, *both, str(signal["compared"]), *proofs, signal["says"])
    output.stdout().print(table)
