"""`art-patch history` and `art-patch diff`: what was decided, and what two policies make of the same prompts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption

if TYPE_CHECKING:
    from art_patch.store import Pair
    from art_patch.types import Call

UPSTREAM = "upstream"


def history(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many.")] = 20,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Every move of a policy, newest first: when, which, from where to where, by whom, why. Nothing is ever changed."""
    from rich.table import Table
    from rich.text import Text

    from art_patch.cli.views.output import answer, stdout
    from art_patch.cli.views.safe_text import one_line

    with opened_store(project=project, home=home, store=store) as (_, opened):
        moves = opened.ledger.history(limit=limit)
    if as_json:
        answer({"history": moves})
        return
    if not moves:
        stdout().print("nothing was decided yet; start `art-patch serve --base MODEL`")
        return
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("when", "policy", "from", "to"):
        table.add_column(column, no_wrap=True)
    for column in ("by", "why"):
        table.add_column(column, overflow="fold")
    for move in moves:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(move["at"]))
        words = (Text(one_line(move[key])) for key in ("who", "reason"))
        table.add_row(when, move["policy"], *_states(move), *words)
    stdout().print(table)


def _states(move: dict[str, Any]) -> tuple[str, str]:
    """From where to where; a canary with its share of the sessions, as far as it is known."""

    def said(state: str | None, share: str) -> str:
        percent = move["metrics"].get(share) if state == "canary" else None
        return f"{state or 'new'}" if percent is None else f"{state} {percent:g} %"

    return said(move["from_state"], "percent_before"), said(move["to_state"], "percent")


def diff(
    a: Annotated[str, typer.Argument(help="NAME@STEP, or upstream.")],
    b: Annotated[str, typer.Argument(help="Another one.")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many prompts.")] = 10,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """What two policies answered to the same recorded prompts, side by side, newest first."""
    from art_patch.cli.views.output import answer, stdout
    from art_patch.errors import StoreError

    with opened_store(project=project, home=home, store=store) as (_, opened):
        for name in (a, b):
            if name != UPSTREAM and opened.ledger.policy(name) is None:
                raise StoreError(f"there is no policy {name!r}; `art-patch policies` lists them")
        count, pairs = opened.answered_by_both(*(None if name == UPSTREAM else name for name in (a, b)), limit=limit)
    if as_json:
        shown = [{"messages": pair.a.messages, "a": _facts(pair.a), "b": _facts(pair.b)} for pair in pairs]
        answer({"a": a, "b": b, "prompts": count, "pairs": shown})
    elif not pairs:
        stdout().print(
            f"no prompt is recorded that both {a} and {b} answered; "
            "`art-patch promote POLICY --shadow` asks a policy what the champion answers",
            soft_wrap=True,
        )
    else:
        _print(a, b, count, pairs)


def _facts(call: Call) -> dict[str, Any]:
    return {
        "call": call.id,
        "trajectory": call.trajectory_id,
        "at": call.started_at,
        "answers": [choice.message for choice in call.choices],
        "completion_tokens": call.completion_tokens,
        "duration_ms": call.duration_ms,
        "shadow_of": call.shadow_of,
    }


def _print(a: str, b: str, count: int, pairs: tuple[Pair, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    from art_patch.cli.views.conversation import words_of
    from art_patch.cli.views.output import stdout
    from art_patch.cli.views.safe_text import one_line

    console, same = stdout(), 0
    for pair in pairs:
        asked = f"{pair.a.messages[-1].get('role', '?')}: {words_of(pair.a.messages[-1])}" if pair.a.messages else ""
        answers = [_answers(call) for call in pair]
        same += answers[0] == answers[1]
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(ratio=1, overflow="fold")
        table.add_column(ratio=1, overflow="fold")
        heads = (f"{name}  {_metrics(call)}" for name, call in zip((a, b), pair, strict=True))
        table.add_row(*(Text(head, style="dim") for head in heads))
        table.add_row(*(Text(text) for text in answers))
        console.print(Text(one_line(asked), style="bold", overflow="ellipsis", no_wrap=True))
        console.print(table)
        console.print()
    rest = f", the newest {len(pairs)} of them above" if count > len(pairs) else ""
    console.print(f"{count} prompts were answered by both{rest}; {same} of these alike", style="dim", soft_wrap=True)


def _answers(call: Call) -> str:
    from art_patch.cli.views.conversation import words_of
    from art_patch.cli.views.safe_text import visible

    return visible("\n--\n".join(words_of(choice.message) for choice in call.choices))


def _metrics(call: Call) -> str:
    from art_patch.cli.views.output import seconds

    return f"{call.completion_tokens} tokens, {seconds(call.duration_ms / 1000)}"
