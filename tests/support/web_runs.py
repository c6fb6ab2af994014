"""Projects with hostile and with learned runs, and what of a page a browser would run."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from art_patch.settings import Settings, load_settings
from art_patch.store import Store, open_store
from art_patch.types import Choice, Correction, Group, Policy, Score, SpanInfo, TrainedRow, Trajectory
from tests.support.run_samples import tool_run, write

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\u2066&\"'{{7*7}}</textarea><b>"
ODD = "a/b ../c?d#e%2F\"'<x>&é"
"""An id of an app's own choice."""


def project(home: Path, name: str) -> tuple[Settings, Store]:
    settings = load_settings(home=home, project=name)
    settings.directory.mkdir(parents=True)
    return settings, open_store(settings.store_url, project=name)


def hostile_run(key: str) -> tuple[Trajectory, tuple[SpanInfo, ...]]:
    """A run of which each field that may be hostile is."""
    run = tool_run(
        key, EVIL, EVIL, user_id=EVIL, session_id=EVIL, scenario_key=EVIL, group_key=EVIL, tags=(EVIL,), name=EVIL,
        metadata={EVIL: {EVIL: [EVIL]}}, error=EVIL,
    )  # fmt: skip
    first, second = run.calls
    called = {
        "role": EVIL, "name": EVIL, "content": [{"type": EVIL, "text": EVIL}, {"type": EVIL, EVIL: EVIL}],
        "refusal": EVIL, "reasoning_content": EVIL, "tool_call_id": EVIL,
        "tool_calls": [{"id": EVIL, "function": {"name": EVIL, "arguments": EVIL}}, EVIL],
    }  # fmt: skip
    calls = (
        replace(
            first, id=f"{key}{EVIL}1", requested_model=EVIL, span_id=f"{key}{EVIL}", choices=(Choice(0, called, EVIL),),
            tools=({"function": {"name": EVIL}},), params={EVIL: EVIL}, status="error", error=EVIL, fallback=EVIL,
            untrainable=EVIL, policy=None, answered_by=EVIL, shadow_of=EVIL,
        ),
        replace(second, id=f"{key}{EVIL}2", policy="agent@1"),
    )  # fmt: skip
    spans = tuple(
        SpanInfo(
            f"{key}{mark}", key, EVIL, 1_000.0, above, 1_002.0, kind="agent",
            attributes={"input": EVIL, EVIL: {EVIL: EVIL}}, error=EVIL,
        )
        for mark, above in ((EVIL, None), ("below", f"{key}{EVIL}"))
    )  # fmt: skip
    score = Score(f"{key}s", key, EVIL, 0.5, "ruler", 1_300.0, comment=EVIL, judge=EVIL, group_id="gone")
    return replace(run, calls=calls, scores=(score,)), spans


def learned_run(store: Store) -> None:
    """A run in a group from which two policies learned, with a sub-agent's span and a correction."""
    one, two = (
        tool_run(key, "fig", answer, started_at=5_000.0, user_id="u-fig", session_id="s-fig", name="figs")
        for key, answer in (("fig-0", "31 cents"), ("fig-1", "no idea"))
    )
    first, second = one.calls
    one = replace(one, calls=(replace(first, span_id="agent"), replace(second, span_id="agent", ttft_ms=100.0)))
    spans = (
        SpanInfo("agent", "fig-0", "shop", 5_000.0, ended_at=5_002.0, kind="agent"),
        SpanInfo(
            "tool", "fig-0", "lookup", 5_000.5, "agent", 5_001.0, kind="tool", attributes={"input": {"item": "fig"}}
        ),
    )
    write(store, one, two)
    store.write([*spans, Correction("right", "fig-0", 5_100.0, "user", {"role": "assistant", "content": "30 cents"})])
    store.ledger.add_groups([Group("fig-group", "fig", "same_task", (one, two))], now=5_200.0)
    store.ledger.add_base("agent@0", "/base", "ff", who="test", now=1.0)
    rows = [TrainedRow(call.id, 0, "fig-0", "fig-group", 1.5, 0.5) for call in one.calls]
    for step, its in ((1, rows), (2, rows[:1])):
        policy = Policy(f"agent@{step}", "/base", "ff", "candidate", 2.0 + step, path="/a", parent="agent@0")
        store.ledger.add_candidate(policy, trained_on=["fig-group"], rows=its, who="test")


class Tags(HTMLParser):
    """What of a page a browser would run, load or style, its links, and the text that it shows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.wrong, self.links, self.ids, self.shown = list[str](), list[str](), list[str](), list[str]()
        self._is_field = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        sources = [named[name] or "" for name in ("src", "action", "formaction") if name in named]
        is_wrong = tag in ("img", "iframe", "b", "x", "style", "object") or (tag == "script" and not named.get("src"))
        outside = any(not source.startswith("/") for source in sources)
        if is_wrong or outside or any(name.startswith("on") or name == "style" for name in named):
            self.wrong.append(f"{tag} {attrs}")
        if tag == "a":
            self.links.append(named.get("href") or "")
        self.ids += [named["id"] or ""] if "id" in named else []
        self._is_field |= tag == "textarea"

    def handle_endtag(self, tag: str) -> None:
        self._is_field &= tag != "textarea"

    def handle_data(self, data: str) -> None:
        self.shown += [] if self._is_field else [data]
