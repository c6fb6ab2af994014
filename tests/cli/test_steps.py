"""The steps of a run as `art-patch trajectories show` prints them, compared whole."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.cli.conversation import steps_tree
from art_patch.store import open_store
from art_patch.types import Call, SpanInfo
from tests.support.run_samples import tool_run

EVIL = "\x1b]0;owned\x07[red]"


def span(key: str, name: str, start: float, end: float | None, above: str | None = None, **about: Any) -> SpanInfo:
    return SpanInfo(key, "run", name, start, above, end, **about)


SPANS = (
    span("root", "shop", 1_000.0, 1_003.0, kind="agent", attributes={"output": {"total": 31}}),
    span("plan", "planner", 1_000.0, 1_001.0, "root", kind="node"),
    span("tool", "lookup", 1_000.75, 1_001.0, "plan", kind="tool",
         attributes={"server": "fruit", "input": {"item": "plum"}, "output": "31\ncents"}),
    span("bad", "charge", 1_002.0, 1_002.5, "root", kind="tool",
         attributes={"input": "x" * 250}, error="KeyError: 'k'"),
    span("own", EVIL, 1_002.75, None, "gone"),
)  # fmt: skip

TREE = """\
steps
├── agent shop  3.0 s
│   output: {"total": 31}
│   ├── node planner  1.0 s
│   │   ├── call 1  agent@1
│   │   └── tool lookup  250 ms
│   │       input: {"item": "plum"}
│   │       output: 31 cents
│   │       server: fruit
│   ├── call 2  agent@1
│   └── tool charge  500 ms
│       failed: KeyError: 'k'
│       input: XX ... 50 more characters; --full shows them
└── \\x1b]0;owned\\x07[red]  has not ended
""".replace("XX", "x" * 200)

PAGE = """\
trajectory  run
started     WHEN; took 1.5 s
identity    explicit
calls       2 (2 trainable, 0 failed) by agent@1
tokens      6 in, 6 out

TREE
call 1  agent@1 RULE
  asked for gpt-5-mini · tool_calls · 3 + 3 tokens · 500 ms · temperature 1.0  in planner
  tools: lookup
system
  You sell fruit. Be brief.
user
  What is a plum?
assistant
  → lookup({"item": "plum"})  call_run

call 2  agent@1 RULE
  asked for gpt-5-mini · stop · 3 + 3 tokens · 500 ms · temperature 1.0  in shop
tool call_run
  31 cents
assistant
  31 cents
""".replace("TREE", TREE).replace("RULE", "─" * 284)


def run_and_spans() -> tuple[Any, tuple[SpanInfo, ...]]:
    run = tool_run("run", "plum", "31 cents")
    first, second = run.calls
    return replace(run, calls=(replace(first, span_id="plan"), replace(second, span_id="root"))), SPANS


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def drawn(spans: tuple[SpanInfo, ...], calls: tuple[Call, ...] = (), width: int = 300, **options: bool) -> list[str]:
    page = io.StringIO()
    Console(file=page, width=width).print(steps_tree(spans, calls, **options))
    return lines(page.getvalue())


def test_every_step_stands_where_it_was_made():
    run, spans = run_and_spans()
    assert drawn(spans, run.calls) == lines(TREE)
    assert drawn(spans[::-1], run.calls) == lines(TREE)


def test_long_and_raw():
    assert any(line.endswith("input: " + "x" * 250) for line in drawn(SPANS, full=True))
    assert '│   │         "output": "31\\ncents"' in "\n".join(drawn(SPANS, raw=True))


@given(st.lists(st.sampled_from("abcdefgh") | st.none(), max_size=8))
def test_any_parents_make_a_tree_with_each_step_once(parents: list[str | None]):
    spans = tuple(span(key, key, 1.0, 2.0, above) for key, above in zip("abcdefgh", parents, strict=False))
    names = sorted(line.replace("│", " ").split()[1] for line in drawn(spans)[1:])
    assert names == [one.id for one in spans]


def test_show_prints_them_and_json_has_them(tmp_path: Path):
    run, spans = run_and_spans()
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    store.write([run.info, *run.calls, *spans])
    store.close()
    words = ["trajectories", "show", "run", "--home", str(tmp_path)]
    page = CliRunner().invoke(app, words, env={"COLUMNS": "300"}).stdout
    assert lines(re.sub(r"(?<=started     ).* ago", "WHEN", page)) == lines(PAGE)
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [one["id"] for one in told["spans"]] == ["plan", "root", "tool", "bad", "own"]
