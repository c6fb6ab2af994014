"""`art-patch policies show`: where a policy comes from, what it learned from, its tests, and how long it served.

All of it is read from the store, none from the policy's files, so it can be shown of a policy whose files are gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from art_patch import store, training, types
from art_patch.cli import output
from art_patch.cli.options import Project
from art_patch.cli.policy_words import canary_in_words, gate_in_words, rejected_there, training_in_words
from art_patch.cli.typed_options import command
from art_patch.errors import NotFound

NOT_ON_RECORD = "not on record"  # a fact that the release which made the policy did not keep


@command
def show_policy(
    policy: Annotated[str, typer.Argument(help="NAME@STEP of a policy in any state.")], project: Project
) -> None:
    """Show where a policy comes from: parents, data, judge, settings, gate, time served, and what became of it.

    `--json` also has the ids of the groups and runs that it learned from, all settings and all metrics.

    Exit codes: 0 shown; 19 there is no such policy.
    """
    with project.opened() as (_, opened):
        known = {each.name: each for each in opened.ledger.policies()}
        if (found := known.get(policy)) is None:
            raise NotFound(f"there is no policy {policy!r}; `art-patch policies` lists them")
        learned = opened.reports.learned(policy)
        moves = opened.ledger.history(limit=None, policy=policy)
    now = time.time()
    served, parents = time_in_states(moves, now), _parents(found, known)
    children = sorted(each.name for each in known.values() if each.parent == policy)
    facts = asdict(found) | {
        "parents": parents,
        "children": children,
        "learned": asdict(learned),
        "made": found.metrics.get("made"),
        "served_s": served,
        "history": moves,
    }
    if not project.answered(facts):
        _print(found, parents, children, learned, moves, served, now)


def time_in_states(moves: Sequence[types.JSON], now: float) -> dict[str, float]:
    """Return the seconds that a policy spent in each state, from its moves, newest first."""
    spent: dict[str, float] = {}
    until = now
    for move in moves:
        spent[move["to_state"]] = spent.get(move["to_state"], 0.0) + max(0.0, until - move["at"])
        until = move["at"]
    return spent


def _parents(policy: types.Policy, known: dict[str, types.Policy]) -> list[str]:
    """Return the policies from which this one was trained, the nearest first."""
    found: list[str] = []
    at: types.Policy | None = policy
    # A store that was put together by hand may have a circle.
    while at is not None and at.parent is not None and at.parent not in found:
        found.append(at.parent)
        at = known.get(at.parent)
    return found


def _print(
    policy: types.Policy,
    parents: Sequence[str],
    children: Sequence[str],
    learned: store.Learned,
    moves: Sequence[types.JSON],
    served: dict[str, float],
    now: float,
) -> None:
    console, made = output.stdout(), _made(policy)
    grid = output.grid("dim", "")

    def row(name: str, words: str) -> None:
        grid.add_row(name, output.Text(output.visible(words)))

    console.print(f"[b]{output.escape(policy.name)}[/] {policy.state}")
    by = f"art_patch {made['art_patch']}" if made else f"art_patch's version is {NOT_ON_RECORD}"
    is_imported = types.IMPORTED in policy.metrics
    made_at = f"{_when(policy.created_at)}, {output.ago(now - policy.created_at)} ago"
    if not is_imported:
        row("made", made_at + (f"; {by}" if parents else ""))
    row("base", f"{policy.base} (fingerprint {policy.base_sha256[:12]})")
    if is_imported:
        _print_evidence(policy, row)
    elif parents:
        row("parents", " < ".join(parents))
        _print_update(policy, learned, row)
    else:
        row("parents", "none: it is the base model, which no update made")
    if children:
        row("children", ", ".join(children))
    row("served", _served(served, learned))
    console.print(grid)
    console.print()
    for move in reversed(moves):
        change = f"{move['from_state'] or 'new'} -> {move['to_state']}"
        console.print(output.Text(f"{_when(move['at'])}  {change}, by {output.one_line(move['who'])}"))
        output.print_below(console, *output.sentences(move["reason"]))


def _print_evidence(policy: types.Policy, row: Any) -> None:
    """Add what an imported policy brought along, all of which is about the project that it comes from."""
    origin: Any = policy.metrics[types.IMPORTED]
    evidence = origin["evidence"]
    state = f", where it was {evidence['state']}" if evidence.get("state") else ""
    row("imported", f"{_when(origin['at'])}, from {evidence['policy']}{state}")
    if (by := rejected_there(policy)) is not None:
        row("rejected", f"there, {by}")
    row("copy", f"its manifest has the sha256 {origin['manifest_sha256']}")
    by, at = evidence.get("art_patch"), evidence.get("made_at")
    row("trained", f"{_when(at) if at else NOT_ON_RECORD}, with art_patch {by or NOT_ON_RECORD}")
    row("parents", f"{evidence.get('parent') or NOT_ON_RECORD} there, none here")
    judges = [f"{each['judge']}, rubric {each['rubric'] or NOT_ON_RECORD}" for each in evidence.get("judges", ())]
    row("judge", "; ".join(judges) or "none is named")
    row("settings", _settings(evidence["settings"]) if evidence.get("settings") else NOT_ON_RECORD)
    _print_training(evidence.get("train") or {}, row)
    gate = evidence.get("gate")
    by = f"; judge {gate['judge']}, rubric {gate.get('rubric') or NOT_ON_RECORD}" if gate and gate.get("judge") else ""
    row("gate there", f"{gate_in_words(gate)}{by}" if gate else "no gate is on record")
    canary = evidence.get("watch")
    row("canary there", canary_in_words(canary) if canary else "no canary test is on record")


def _print_update(policy: types.Policy, learned: store.Learned, row: Any) -> None:
    train: Any = policy.metrics.get("train") or {}
    groups = output.counted(len(learned.groups), "group", "groups")
    erased = len(learned.groups) - learned.groups_there
    runs = output.counted(len(learned.runs), "of its runs is", "of their runs are") + " in the store"
    alone = f", and {output.counted(learned.alone, 'run', 'runs')} in no group" if learned.alone else ""
    lost = f"; {output.counted(erased, 'group is', 'groups are')} erased" if erased else ""
    row("learned from", f"{groups}, {runs}{alone}{lost}")
    named = [(each["judge"], each["rubric"]) for each in _made(policy).get("judges", ())]
    judges = [f"{judge}, rubric {rubric or NOT_ON_RECORD}" for judge, rubric in named or learned.judges]
    none = "none: the rewards came from users or code" if _made(policy) else NOT_ON_RECORD
    row("judge", "; ".join(judges) or none)
    config = train.get("config")
    row("seed", str(config["seed"]) if config and "seed" in config else NOT_ON_RECORD)
    row("settings", _settings(config) if config else NOT_ON_RECORD)
    _print_training(train, row)
    gate: Any = policy.metrics.get("gate") or {}
    judge = f"; judge {gate['judge']}, rubric {gate.get('rubric') or NOT_ON_RECORD}" if gate.get("judge") else ""
    row("gate", f"{gate_in_words(gate)}{judge}" if gate else "no gate has tested it")
    if watch := policy.metrics.get("watch"):
        row("canary", canary_in_words(watch))


def _print_training(numbers: Any, row: Any) -> None:
    for index, line in enumerate(training_in_words(numbers) or [NOT_ON_RECORD]):
        row("" if index else "training", line)


def _settings(config: types.JSON) -> str:
    """Return the settings of an update that are not the defaults of this release."""
    # Through JSON's types: the store has lists where a config has tuples.
    usual = {
        key: list(value) if isinstance(value, tuple) else value for key, value in asdict(training.TrainConfig()).items()
    }
    other = {key: value for key, value in config.items() if key not in usual or usual[key] != value}
    words = ", ".join(f"{key} {value}" for key, value in sorted(other.items()) if key != "seed")
    return f"as this release has them, but {words}" if words else "as this release has them; --json has all"


def _served(served: dict[str, float], learned: store.Learned) -> str:
    spent = [f"{output.ago(served[state])} as {state}" for state in ("champion", "canary") if state in served]
    calls = output.counted(learned.answered, "call", "calls")
    copies = f", and {output.counted(learned.copies, 'copy', 'copies')} in the background" if learned.copies else ""
    return f"{output.listed(spent, 'never')}; {calls} of apps in the store, answered by it{copies}"


def _made(policy: types.Policy) -> dict[str, Any]:
    made: Any = policy.metrics.get("made")
    return made or {}


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
