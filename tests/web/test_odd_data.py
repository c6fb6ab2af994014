"""What apps may call their runs and nest in them, and files that somebody has damaged: every page still answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_patch.settings import Settings, load_settings
from art_patch.store import open_store
from art_patch.types import Call, Choice, Correction, Group, SpanInfo, Trajectory, TrajectoryInfo
from tests.support.web import csrf_of, served
from tests.support.web_runs import Tags

IDS = (
    "\n", "a\n", "\na", "a\nb", "a\r\nb", "\r", "\t", " ", " a ", ".", "..", "~.", "~~..", "...", "a/..", "../a",
    "a/../b", "/a", "a/", "//a", "a//b", "%2e", "%2F", "a%0Ab", "%", "+", "a?b#c", "a;b=c&d", "a\\b", "\u2028",
    "\u202e", "é\u0301", "😀", "~", "x" * 3_000, "a@b:c", "<b>\"'", "answers",
)  # fmt: skip


def messages(*, nested: Any = None) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": "how many?"} | ({} if nested is None else {"more": nested}),)


def project(home: Path) -> Settings:
    settings = load_settings(home=home, project="one")
    settings.directory.mkdir(parents=True)
    open_store(settings.store_url, project="one").close()
    return settings


def run(key: str, at: float, *, call: str = "", said: str = "one", **about: Any) -> tuple[TrajectoryInfo, Call]:
    answer = Choice(0, {"role": "assistant", "content": said}, "stop")
    return TrajectoryInfo(key, at, **about), Call(
        call or f"{key}-1", key, at, "m", messages(), (answer,), duration_ms=5.0
    )


# --- ids ---


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = project(tmp_path_factory.mktemp("home"))
    with closing(open_store(settings.store_url, project="one")) as store:
        for number, key in enumerate(IDS):
            store.write(list(run(key, 1_000.0 + number, call=f"call of {key}")))
            one, other = (run(f"{key} {name}", 900.0, said=name) for name in "ab")
            store.write([*one, *other])
            members = tuple(Trajectory(info, (call,)) for info, call in (one, other))
            store.ledger.add_groups([Group(key, key, "same_task", members)], now=1_100.0 + number)
    with served(settings) as running, running.entered() as entered:
        yield entered


def fields_of(page: str, action: str) -> dict[str, str]:
    """The hidden fields of a form, as a browser sends them: with the line ends of the web."""
    form = page.partition(f'action="{action}"')[2].partition("</form>")[0]
    names = [each.partition('"')[0] for each in form.split('type="hidden" name="')[1:]]
    values = [each.partition('value="')[2].partition('"')[0] for each in form.split('type="hidden" name="')[1:]]
    return {name: value.replace("\r\n", "\n").replace("\n", "\r\n") for name, value in zip(names, values, strict=True)}


@pytest.fixture(scope="module")
def links(client: httpx.Client) -> dict[str, str]:
    """The links to runs and to groups of the lists' pages, by the id that their pages tell."""
    found = dict[str, str]()
    for kind in ("runs", "groups"):
        address = f"/p/one/{kind}"
        while address:
            told = Tags(client.get(address).text).links
            for link in told:
                if link.startswith(f"/p/one/{kind}/"):
                    its = client.get(link.replace("/p/", "/api/v1/", 1)).json()
                    found[f"{kind}: {its['run']['id'] if kind == 'runs' else its['id']}"] = link
            address = next((link for link in told if "after=" in link or "before=" in link), "")
    return found


def test_the_lists_link_to_everything_whatever_the_ids_are(links: dict[str, str]):
    runs = {*IDS, *(f"{key} {name}" for key in IDS for name in "ab")}
    assert links.keys() == {*(f"runs: {key}" for key in runs), *(f"groups: {key}" for key in IDS)}


@pytest.mark.parametrize("key", IDS)
def test_all_that_a_person_does_with_a_run_works_whatever_its_id_is(
    client: httpx.Client, links: dict[str, str], key: str
):
    link = links[f"runs: {key}"]
    page = client.get(link)
    for each in Tags(page.text).links:
        if each.startswith("/"):
            assert client.get(each).status_code == 200, each
    for what, more in (("score", {"name": "thumbs", "value": "1"}), ("correct", {"answer": "two"})):
        action = link.replace("/runs/", f"/{what}-run/", 1)
        form = fields_of(page.text, action) | {"who": "Ann"} | more
        assert client.post(action, data=form).status_code == 200, (what, form)
    told = client.get(link.replace("/p/", "/api/v1/", 1)).json()
    assert ([one["name"] for one in told["scores"]], len(told["corrections"])) == (["thumbs"], 1)
    assert told["corrections"][0]["call_id"] == f"call of {key}"


@pytest.mark.parametrize("key", IDS)
def test_groups_and_reviews_work_whatever_the_ids_are(client: httpx.Client, links: dict[str, str], key: str):
    path = links[f"groups: {key}"]
    page = client.get(path)
    chosen = [each.partition('"')[0] for each in page.text.split('<option value="')[1:]]
    sides = {"left": chosen[0], "right": chosen[1]}
    compared = client.get(path.replace("/p/", "/api/v1/", 1), params=sides).json()["compared"]
    assert {compared["left"], compared["right"]} == {f"{key} a", f"{key} b"}
    asked = client.get("/p/one/review", params={"group": key})
    form = fields_of(asked.text, "/p/one/review/prefer")
    done = client.post("/p/one/review/prefer", data=form | {"who": "Ann", "choice": "left"})
    assert (done.status_code, "Noted." in done.text) == (200, True)
    for what, more in (("thumb", {"thumb": "up"}), ("correct", {"answer": "two"})):
        form = fields_of(asked.text, f"/p/one/review/{what}") | {"who": "Ann"} | more
        assert client.post(f"/p/one/review/{what}", data=form).status_code == 200, form
    assert client.get("/api/v1/one/review", params={"group": key, "answered": key}).json()["answered"]["group"] == key


def test_an_erased_run_of_an_odd_id_is_gone(tmp_path: Path):
    settings = project(tmp_path)
    with closing(open_store(settings.store_url, project="one")) as store:
        for key in ("a\nb", "..", "\n"):
            store.write(list(run(key, 1.0)))
    with served(settings) as running, running.entered() as client:
        for path in ("a%0Ab", "~..", "%0A"):
            form = {"csrf": csrf_of(client.get(f"/p/one/erase-run/{path}")), "who": "Ann"}
            assert client.post(f"/p/one/erase-run/{path}", data=form).status_code == 200
            assert client.get(f"/p/one/runs/{path}").status_code == 404


# --- depth ---


def nested(depth: int) -> Any:
    value: Any = {"end": 1}
    for _ in range(depth // 2):
        value = [{"a": value}]
    return value


KINDS = ("metadata", "attributes", "params", "message", "answer", "tools", "correction")
PATHS = ("runs/{}", "runs/{}?full=true&tokens=true", "erase-run/{}", "run-test/{}", "groups/g-{}", "review?group=g-{}")


def write_nested(settings: Settings, deep: Any) -> None:
    """For each place that an app fills, a run with the value there, in a group with a plain one."""
    with closing(open_store(settings.store_url, project="one")) as store:
        for number, kind in enumerate(KINDS):
            info, call = run(kind, 1_000.0 + number, said=kind, metadata={"m": deep} if kind == "metadata" else {})
            said = {"role": "assistant", "content": kind, "tool_calls": [{"function": {"name": "f"}}], "more": deep}
            values: dict[str, Any] = {
                "params": {"params": {"p": deep}}, "message": {"messages": messages(nested=deep)},
                "answer": {"choices": (Choice(0, said, "stop"),)}, "tools": {"tools": ({"function": deep},)},
            }.get(kind, {})  # fmt: skip
            named = {name: getattr(call, name) for name in call.__slots__ if name not in values}
            records: list[Any] = [info, Call(**named, **values)]
            if kind == "attributes":
                records.append(SpanInfo("s", kind, "s", 1_000.0, ended_at=1_001.0, attributes={"input": deep}))
            if kind == "correction":
                records.append(Correction("c", kind, 1_001.0, "user", {"role": "assistant", "content": "x", "z": deep}))
            plain = run(f"{kind} plain", 1_000.0)
            store.write([*records, *plain])
            members = (Trajectory(info, ()), Trajectory(plain[0], (plain[1],)))
            store.ledger.add_groups([Group(f"g-{kind}", kind, "same_task", members)], now=2_000.0)


@pytest.mark.parametrize("depth", [150, 300, 600, 950])
def test_what_is_nested_deep_is_shown_or_said(tmp_path: Path, depth: int):
    settings = project(tmp_path)
    # As a recorder does: in a thread, in which Python allows more than below a test.
    with ThreadPoolExecutor(1) as recorder:
        recorder.submit(write_nested, settings, nested(depth)).result()
    with served(settings) as running, running.entered() as client:
        for path in ("", "runs", "groups", "review", "system"):
            assert client.get(f"/p/one/{path}").status_code == 200, path
        for kind in KINDS:
            for path in PATHS:
                for base in ("/p/one/", "/api/v1/one/"):
                    answer = client.get(base + path.format(kind))
                    is_said = answer.status_code == 422 and "nested too deep" in answer.text
                    assert answer.status_code == 200 or (is_said and depth > 600), (kind, path, answer.text)


# --- reports of cycles ---

GATE = {"candidate": 0.7, "champion": 0.6, "difference": 0.1, "lower_bound": 0.05, "scenarios": 21}
REPORT: dict[str, Any] = {
    "outcome": "rejected", "champion": "agent@0", "candidate": "agent@1", "began_at": 1_790_000_000.0, "took_s": 4.0,
    "who": "ada", "reason": "not better", "stages_s": {"group": 1.0, "train": 3.0},
    "metrics": {"train": {"history": [{"loss": 0.5}, {"loss": 0.4}]}, "gate": GATE},
}  # fmt: skip
HUGE = 10**400
DAMAGED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"candidate": ["agent@1"]}, "candidate"),
    ({"candidate": "agent\0\ud800"}, "candidate"),
    ({"champion": 5, "who": {"a": 1}, "reason": [1]}, "champion, who, reason"),
    ({"began_at": 1e12}, ""),
    ({"began_at": -1e11}, ""),
    ({"took_s": "long"}, "took_s"),
    ({"took_s": HUGE}, "took_s"),
    ({"took_s": math.nan, "stages_s": {"group": math.inf, "train": "x", "gate": HUGE, "score": 2.0}}, "stages_s train"),
    ({"stages_s": [1]}, "stages_s"),
    ({"metrics": [1]}, "metrics"),
    ({"metrics": {"gate": "x", "train": 5}}, "all of it"),
    ({"metrics": {"gate": GATE | {"difference": "high"}}}, "difference"),
    ({"metrics": {"gate": GATE | {"candidate": [1], "scenarios": HUGE}}}, "candidate, scenarios"),
    ({"metrics": {"gate": GATE | {"difference": HUGE, "lower_bound": math.nan}}}, "difference"),
    ({"metrics": {"gate": GATE | {"gains": [{"name": "x"}], "checks": [5], "ruined": "x"}}}, "checks, gains, ruined"),
    ({"metrics": {"gate": GATE | {"gains": 5, "left": [1], "results": 7, "config": "x"}}}, "config, gains, left"),
    ({"metrics": {"gate": GATE | {"config": {"margin": "wide"}}, "upstream_gate": {"a": nested(200)}}}, "config"),
    ({"metrics": {"train": {"history": [{"loss": HUGE}, {"loss": "x"}, 5, {"loss": 0.5}]}}}, ""),
    ({"metrics": {"train": {"history": {"loss": 1}}, "score": {"cost_usd": "dear"}}}, "score cost_usd"),
    ({"metrics": {"score": {"cost_usd": HUGE, "deep": nested(500)}, "x": None, "y": nested(100)}}, "score cost_usd"),
)


def test_a_damaged_report_shows_what_can_be_read_and_names_the_rest(tmp_path: Path):
    settings = project(tmp_path)
    folder = settings.directory / "cycles"
    folder.mkdir()
    for number, (damage, _) in enumerate(DAMAGED):
        (folder / f"20260101T0000{number:02}Z-aaaaaaaa.json").write_text(json.dumps(REPORT | damage))
    gone = (
        "[" * 5_000,
        "[1]",
        '{"outcome": 1}',
        json.dumps(REPORT | {"began_at": "soon"}),
        "\ud800",
        "9" * 5_000,
        '{"outcome": "x", "began_at": NaN}',
    )
    for number, text in enumerate(gone):
        (folder / f"20250101T0000{number:02}Z-bbbbbbbb.json").write_text(text, "utf-8", "surrogatepass")
    (folder / "20240101T000000Z-cccccccc.json").mkdir()
    (folder / "20240101T000001Z-\n \"'<b>.json").write_text(json.dumps(REPORT))
    with served(settings) as running, running.entered() as client:
        listed = client.get("/api/v1/one/cycles?limit=200").json()
        assert (len(listed["cycles"]), len(listed["unread"])) == (len(DAMAGED) + 1, len(gone) + 1)
        page = client.get("/p/one/cycles")
        assert (page.status_code, "Reports that could not be read: 2025" in page.text) == (200, True)
        for number, (damage, unread) in enumerate(DAMAGED):
            key = f"20260101T0000{number:02}Z-aaaaaaaa"
            assert client.get(f"/api/v1/one/cycles/{key}").status_code == 200, damage
            page = client.get(f"/p/one/cycles/{key}")
            assert (page.status_code, unread in page.text) == (200, True), (damage, page.text)
            assert ("could not be read" in page.text) == bool(unread), damage
        links = [
            link
            for link in Tags(client.get("/p/one/cycles?limit=200").text).links
            if link.startswith("/p/one/cycles/2")
        ]
        assert [client.get(link).status_code for link in links] == [200] * len(links)
        assert len(links) == len(listed["cycles"])
        assert client.get("/p/one/cycles?limit=1&before=20250102").status_code == 200


RUNNING: dict[str, Any] = {
    "who": "ada",
    "began_at": 1_790_000_000.0,
    "stages": {"group": {"since": 1.0, "at": 2.0, "done": 1, "total": 4}},
}


@pytest.mark.parametrize(
    "damage",
    [
        {"stages": []}, {"stages": {"group": 5}}, {"stages": {"group": {"since": "x", "done": HUGE, "total": None}}},
        {"began_at": 1e12}, {"began_at": "x"}, {"began_at": HUGE}, {"who": [1]}, {"owner": 5},
        {"stages": {"group": {"since": math.nan}}}, {"stages": {"deep": nested(300)}},
    ],
)  # fmt: skip
def test_a_damaged_note_of_the_cycle_that_runs_breaks_no_page(tmp_path: Path, damage: dict[str, Any]):
    from dataclasses import asdict

    from art_patch._lib.process import owning

    settings = project(tmp_path)
    with owning() as owner, served(settings) as running, running.entered() as client:
        (settings.directory / "running.json").write_text(json.dumps(RUNNING | {"owner": asdict(owner)} | damage))
        last = {"ended_at": math.inf, "took_s": 1.0, "exit_code": 0, "outcome": "x"}
        for note in (
            last,
            last | {"ended_at": 1e12, "exit_code": math.inf},
            last | {"ended_at": HUGE},
            [1],
            nested(900),
        ):
            (settings.directory / "last_retrain.json").write_text(json.dumps(note))
            for path in ("/p/one/", "/p/one/cycles", "/p/one/cycles/start", "/api/v1/one/cycles", "/status"):
                assert client.get(path).status_code == 200, (path, damage, note)
