"""Prints what `art-patch status` shows: a line for each fact, the app processes, and the newest decisions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from textwrap import shorten
from typing import Any

from art_patch import pipeline, promotion, store, types
from art_patch.cli import output

_MOST_APPS = 10
_COUNTS = {
    "queued": "queued", "recorded": "recorded", "dropped": "dropped", "fallbacks": "fell back", "shadowed": "shadowed",
}  # fmt: skip
_FORMS: dict[str, type] = {
    "mode": str, "art_patch": str, "instrumented": list, "degraded": list, "bypasses": dict, "open_breakers": list,
    "breakers_open_since": dict,
    **dict.fromkeys(_COUNTS, int),
}  # fmt: skip


def print_status(facts: dict[str, Any]) -> None:
    """Print the facts of `status`."""
    console, recorded, engine, now = output.stdout(), facts["recorded"], facts["engine"], time.time()
    table = output.grid("dim", "")
    last = f", last {output.ago(now - recorded['last_call_at'])} ago" if recorded["last_call_at"] else ""
    served = f"{recorded['calls_by_policy']} by our policies, {recorded['calls_fell_back']} fell back"
    if recorded["calls_engine_full"]:
        served += f" ({recorded['calls_engine_full']} because the engine was full)"
    health = "healthy" if engine["healthy"] else "[red]not reachable[/]: calls go upstream"
    # An engine may be up and still lack the champion; apps send no call there then.
    if engine["healthy"] and facts["champion"] not in (None, *engine["models"]):
        health = f"[red]does not have {facts['champion']} loaded[/]: calls go upstream"
    mode = f"canary, {facts['canary_percent']:g} % of the sessions" if facts["mode"] == "canary" else facts["mode"]
    rows = [
        ("project", facts["project"]),
        ("store", facts["store"]),
        ("mode", mode),
        ("champion", f"[b]{facts['champion']}[/]" if facts["champion"] else _no_champion(facts)),
        ("engine", f"{engine['base_url']} {health}" if engine["base_url"] else "none running; start `art-patch serve`"),
        ("calls", f"{recorded['calls']} ({served}, {recorded['calls_not_ok']} not ok{last})"),
        ("trainable", f"{recorded['calls_trainable']} calls"),
        ("trajectories", f"{recorded['trajectories']} in {recorded['scenarios']} grouped scenarios"),
        ("groups", output.listed([f"{count} {state}" for state, count in recorded["groups"].items()], "none yet")),
    ]
    standing_by = [each for each in facts["servers"] if each["state"] in ("stands by", "leaving")]
    for each in reversed(standing_by):
        rows.insert(
            5, ("leaving" if each["state"] == "leaving" else "stands by", _stands_by(each, facts["champion"], now))
        )
    if (tested := facts["challenger"]) is not None:
        rows.insert(4, ("challenger", _tested(tested, now)))
    if (learner := facts["learner"]) is not None:
        rows.insert(4, ("learner", f"[b]{learner['policy']}[/] {pipeline.what_is_missing(learner)}"))
    if facts["control_since"] is not None:
        rows.insert(4, ("control group", _control(facts, now)))
    if (change := facts["upstream_change"]) is not None:
        said = output.changed(types.UpstreamChange(**change))
        rows.append(("upstream", output.escape(f"{said}; earlier evidence is not used")))
    if recorded["calls_shadow"]:
        rows.append(("shadow", f"{recorded['calls_shadow']} calls asked in the background, beside the above"))
    if recorded["calls_resampled"]:
        rows.append(("re-sampled", f"{recorded['calls_resampled']} answers of our own beside the above"))
    if (judge := recorded["judge"])["calls"]:
        rows.append(("judge", _spent(judge)))
    if (differ := facts["disagreement"])["pairs"]:
        rows.append(("people", _differ(differ)))
    for name, value in rows:
        table.add_row(name, str(value))
    for reason, count in recorded["not_learned_from"].items():
        table.add_row("", f"[dim]{count} runs not learned from: {reason}[/]")
    for reason, count in recorded["untrainable"].items():
        table.add_row("", f"[dim]{count} not trainable: {reason}[/]")
    for reason, count in recorded["fell_back"].items():
        table.add_row("", output.cell(f"{count} fell back: {reason}", "dim"))
    console.print(table)
    if facts["apps"]:
        _print_apps(facts["apps"], now)
    if facts["history"]:
        _print_moves(facts["history"], now)


def _print_moves(moves: Sequence[types.JSON], now: float) -> None:
    console, ages = output.stdout(), [f"{output.ago(now - move['at'])} ago" for move in moves]
    when, name = max(map(len, ages)), max(len(move["policy"]) for move in moves)
    console.print()
    for at, move in zip(ages, moves, strict=True):
        console.print(output.Text(f"{at:>{when}}  {move['policy']:{name}}  became {move['to_state']}"))
        # Two lines of 80 columns: reasons of a gate fill a screen, and `art-patch history` has them whole.
        why = output.one_line(f"by {move['who']}: {move['reason']}")
        output.print_below(console, shorten(why, 150, placeholder=" ..."))


def _stands_by(server: dict[str, Any], champion: str | None, now: float) -> str:
    health = "healthy" if server["healthy"] else "[red]not reachable[/]"
    if server["healthy"] and champion not in (None, *server["models"]):
        health = f"[yellow]loads {champion}[/]"
    return f"{server['base_url']} {health}, started {output.ago(now - server['since'])} ago"


def _no_champion(facts: dict[str, Any]) -> str:
    if facts["learner"] is not None:
        return "learning, upstream answers"
    return "upstream, beside the canary" if facts["challenger"] is not None else "none: calls go upstream"


def _control(facts: dict[str, Any], now: float) -> str:
    look, since = facts["control_look"], facts["control_since"]
    when = f"{datetime.fromtimestamp(since):%Y-%m-%d %H:%M}, {output.ago(now - since)} ago"
    told = "not compared yet"
    if look:
        told = f"compared {output.ago(now - look['at'])} ago: {promotion.look_in_words(look)}"
    return f"{facts['control_percent']:g} % of the sessions stay with upstream since {when}; {told}"


def _tested(challenger: dict[str, Any], now: float) -> str:
    share = "asked in the background" if challenger["percent"] is None else f"{challenger['percent']:g} % of sessions"
    return f"[b]{challenger['policy']}[/] {challenger['state']}, {share}, for {output.ago(now - challenger['since'])}"


def _spent(judge: dict[str, Any]) -> str:
    unpriced = f", and {judge['unpriced']} calls of unknown price" if judge["unpriced"] else ""
    tokens = judge["prompt_tokens"] + judge["completion_tokens"]
    return f"{judge['calls']} calls, {tokens:,} tokens, ${judge['cost_usd']:.2f}{unpriced}"


def _differ(metrics: dict[str, Any]) -> str:
    tied = f", sees no difference in {metrics['tied']}" if metrics["tied"] else ""
    return (
        f"the judge orders {metrics['against']} of {metrics['pairs']} sibling pairs ({metrics['share']:.0%}) "
        f"the other way round than they do{tied}"
    )


def _well_formed(app: dict[str, Any]) -> dict[str, Any]:
    """Return what an app process said, as far as it has the form: other releases say less, or something else."""
    kept: dict[str, Any] = {key: value for key, value in app.items() if isinstance(value, _FORMS.get(key, object))}
    kept = {"mode": "", "instrumented": [], "degraded": [], "bypasses": {}} | kept
    lists = {key: list(map(str, kept[key])) for key in ("instrumented", "degraded")}
    counts = {name: count for name, count in kept["bypasses"].items() if isinstance(count, int)}
    return kept | lists | {"bypasses": counts}


def _open_breakers(live: Sequence[dict[str, Any]], now: float) -> Iterator[str]:
    """Yield a line for each circuit breaker that is open in app processes that run: in how many, and since when."""
    for name in ("engine", "challenger"):
        its = [app for app in live if name in app.get("open_breakers", [])]
        # Apps of earlier releases do not tell when.
        told = (app.get("breakers_open_since", {}).get(name) for app in its)
        known = [min(at, now) for at in told if isinstance(at, int | float) and at > 0]  # clocks differ
        since = ""
        if known:
            since = f" since {datetime.fromtimestamp(min(known)):%Y-%m-%d %H:%M:%S}, {output.ago(now - min(known))} ago"
        if its:
            where = f"{len(its)} of {output.counted(len(live), 'app process', 'app processes')}"
            yield f"circuit breaker of the {name}: open in {where}{since}"


def _print_apps(apps: list[dict[str, Any]], now: float) -> None:
    apps = list(map(_well_formed, apps))
    live = [app for app in apps if now - app["at"] < store.APPS_LIVE_S]
    shown, others = live[:_MOST_APPS], live[_MOST_APPS:] + [app for app in apps if app not in live]
    output.stdout().print()
    if shown:
        counts = [key for key in _COUNTS if key == "recorded" or any(app.get(key) for app in shown)]
        names = [_COUNTS[key] for key in counts]
        table = output.table("app process", "last seen", "release", "mode", *names, right=names, padding=(0, 2, 0, 0))
        for app in shown:
            # Apps of earlier releases do not tell all of it.
            release, numbers = app.get("art_patch", ""), (app.get(key, 0) for key in counts)
            words = (app["id"], f"{output.ago(now - app['at'])} ago", release, app["mode"], *numbers)
            table.add_row(*map(output.cell, words))
        output.stdout().print(table)
    if others:
        many = output.counted(len(others), "app process", "app processes")
        sums = ", ".join(
            f"{sum(app.get(key, 0) for app in others)} {name}" for key, name in _COUNTS.items() if key != "queued"
        )
        output.say(f"{many} {'more ' if shown else ''}in the last hour, most of them ended: {sums}", style="dim")
    for line in _open_breakers(live, now):
        output.stdout().print(output.Text(line, "yellow"))
    # By what they say: hundreds of short processes say the same.
    said: dict[str, list[str]] = {}
    passed: Counter[str] = Counter()
    for app in apps:
        passed.update(app["bypasses"])
        for sentence in (f"sees {output.listed(app['instrumented'], 'nothing yet')}", *app["degraded"]):
            said.setdefault(sentence, []).append(app["id"])
    for sentence, ids in said.items():
        who = ids[0] if len(ids) == 1 else f"{len(ids)} processes"
        output.say(f"{who}: {output.one_line(sentence)}", style="dim" if sentence.startswith("sees ") else "yellow")
    for name, count in passed.items():
        output.say(f"{count} calls went past the patch by {output.one_line(name)}", style="yellow")
