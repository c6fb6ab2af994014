"""Export and import as files: who may read them, when they appear, what happens to a broken one."""

from __future__ import annotations

import io
import json
import stat
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.ids import replay_id
from art_patch.cli.commands.files import export, import_file
from art_patch.errors import ConfigError, MalformedFile
from art_patch.formats import COLUMNS, Bundle, encode, reading, writing
from art_patch.store import Filter, Store, open_store
from tests.support.run_samples import plain_run, tool_run, write

USER = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}


def rows_of(path: Path) -> list[dict[str, Any]]:
    with reading(str(path)) as rows:
        return [dict(row) for _, row in rows()]


def facts(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("format", ["chat", "sft", "sft-prompt", "preference", "grpo"])
def test_parquet_holds_what_json_lines_hold(format: str, filled: Store, url: str, tmp_path: Path):
    style = "prompt" if format == "sft-prompt" else "messages"
    for suffix in ("jsonl", "parquet"):
        export(
            str(tmp_path / f"all.{suffix}"), format=format.removesuffix("-prompt"), style=style, store=url, as_json=True
        )
    lines, table = rows_of(tmp_path / "all.jsonl"), rows_of(tmp_path / "all.parquet")
    assert table == [{name: row.get(name) for name in COLUMNS[format]} for row in lines]
    assert lines


@pytest.mark.parametrize(
    ("format", "rows", "trajectories", "skipped"),
    [
        ("chat", 7, 7, {"it ends without an answer": 1, "no call was recorded": 1}),
        ("sft", 7, 7, {"it ends without an answer": 1, "no call was recorded": 1}),
        ("preference", 2, 6, {}),
        ("grpo", 4, 8, {"no call was recorded": 1}),
        ("trajectories", 10, 10, {}),
    ],
)
def test_what_was_written_is_told_and_noted(
    format: str, rows: int, trajectories: int, skipped: dict[str, int], filled: Store, url: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    file = tmp_path / "out.jsonl"
    export(str(file), format=format, store=url, who="ann", as_json=True)
    told = facts(capsys)
    assert (told["rows"], told["trajectories"], told["skipped"]) == (rows, trajectories, skipped)
    assert len(rows_of(file)) == rows
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (noted,) = filled.transfers.exports()
    assert (noted.id, noted.path, noted.format) == (told["export"], str(file), format)
    assert (noted.trajectories, noted.who) == (trajectories, "ann (art-patch export)")
    assert filled.verify() == []


def test_the_newest_come_first(filled: Store, url: str, tmp_path: Path):
    export(str(tmp_path / "out.jsonl"), store=url)
    answers = [row["messages"][-1]["content"] for row in rows_of(tmp_path / "out.jsonl")]
    assert answers == ["see you", "pear 2", "pear 1", "pear 0", "plum 2", "plum 1", "plum 0"]


def test_good_ones_only(filled: Store, url: str, tmp_path: Path):
    export(str(tmp_path / "out.jsonl"), format="sft", min_reward=0.8, store=url)
    answers = [row["messages"][-1]["content"] for row in rows_of(tmp_path / "out.jsonl")]
    assert answers == ["pear 2", "pear 0", "plum 2", "plum 0"]


def test_an_export_of_one_user_holds_nobody_else(filled: Store, url: str, tmp_path: Path):
    for format in ("chat", "sft", "preference", "grpo", "trajectories"):
        export(str(tmp_path / format), format=format, user="user-a", store=url)
        assert "pear" not in (tmp_path / format).read_text()
        assert "plum" in (tmp_path / format).read_text()


def test_erasing_finds_the_file(filled: Store, url: str, tmp_path: Path):
    export(str(tmp_path / "a.jsonl"), user="user-a", store=url)
    export(str(tmp_path / "b.jsonl"), format="preference", user="user-b", store=url)
    assert [held.path for held in filled.rights.erase(user="user-b", dry_run=True).exports] == [
        str(tmp_path / "b.jsonl")
    ]


def test_a_file_that_is_there_is_kept(filled: Store, url: str, tmp_path: Path):
    file = tmp_path / "out.jsonl"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        export(str(file), store=url)
    assert file.read_text() == "mine"
    assert filled.transfers.exports() == ()
    export(str(file), store=url, force=True)
    assert len(rows_of(file)) == 7


@pytest.mark.parametrize("path", ["no/such/directory/out.jsonl", "."])
def test_a_place_that_cannot_be_written(path: str, filled: Store, url: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="name"):
        export(str(tmp_path / path), store=url)


def test_no_row_makes_no_file(filled: Store, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    export(str(tmp_path / "out.jsonl"), user="nobody", store=url)
    assert capsys.readouterr().out == "none of 9 trajectories matches; nothing was written\n"
    assert not list(tmp_path.glob("out*"))
    assert filled.transfers.exports() == ()


def test_a_failure_leaves_no_file_and_no_note(filled: Store, tmp_path: Path):
    file = tmp_path / "out.jsonl"
    with (
        pytest.raises(RuntimeError),
        filled.transfers.note_export(str(file), "chat", who="ann") as note,
        writing(str(file), None) as put,
    ):
        note.add(["a0"])
        put({"a": 1})
        assert (tmp_path / "out.jsonl.part").exists()
        assert len(filled.transfers.exports()) == 1  # noted before it is there
        raise RuntimeError
    assert not list(tmp_path.glob("out*"))
    assert filled.transfers.exports() == ()
    assert filled.rights.erase(user="user-a", dry_run=True).exports == ()


def test_what_a_killed_run_left_is_replaced(filled: Store, url: str, tmp_path: Path):
    part = tmp_path / "out.jsonl.part"
    part.write_text("half")
    part.chmod(0o644)
    export(str(tmp_path / "out.jsonl"), store=url)
    assert not part.exists()
    assert stat.S_IMODE((tmp_path / "out.jsonl").stat().st_mode) == 0o600


def test_without_pyarrow_the_extra_is_named(filled: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"art-patch\[parquet\]"):
        export(str(tmp_path / "out.parquet"), store=url)
    assert not list(tmp_path.glob("out*"))
    (tmp_path / "in").write_bytes(b"PAR1....PAR1")
    with pytest.raises(ConfigError, match=r"art-patch\[parquet\]"):
        import_file(str(tmp_path / "in"), store=url)


# import


def import_lines(tmp_path: Path, *lines: str) -> Store:
    file = tmp_path / "in.jsonl"
    file.write_bytes("\n".join(lines).encode())
    import_file(str(file), store=f"sqlite:///{tmp_path}/new.db", who="ann")
    return open_store(f"sqlite:///{tmp_path}/new.db")


@pytest.mark.parametrize("format", ["chat", "sft", "preference", "grpo", "trajectories"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_importing_twice_adds_nothing(
    format: str, suffix: str, filled: Store, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, other = str(tmp_path / f"out.{suffix}"), f"sqlite:///{tmp_path}/other.db"
    export(file, format=format, store=url)
    capsys.readouterr()
    seen: list[Any] = []
    for _ in range(2):
        import_file(file, store=other, as_json=True)
        told = facts(capsys)
        store = open_store(other)
        seen.append((store.read.counts(), store.read.recent(limit=100)))
        assert store.verify() == []
        store.close()
    assert seen[0] == seen[1]
    assert (told["trajectories"], told["already_there"]) == (0, told["read"])


def test_chat_comes_back_line_by_line(filled: Store, url: str, tmp_path: Path):
    export(str(tmp_path / "one.jsonl"), store=url)
    other = f"sqlite:///{tmp_path}/other.db"
    import_file(str(tmp_path / "one.jsonl"), store=other)
    export(str(tmp_path / "two.jsonl"), store=other)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_preferences_come_back(filled: Store, url: str, tmp_path: Path):
    export(str(tmp_path / "one.jsonl"), format="preference", store=url)
    other = f"sqlite:///{tmp_path}/other.db"
    import_file(str(tmp_path / "one.jsonl"), store=other)
    export(str(tmp_path / "two.jsonl"), format="preference", store=other)

    def pairs(name: str) -> list[Any]:
        rows = [{k: v for k, v in row.items() if k != "group_id"} for row in rows_of(tmp_path / name)]
        return sorted(rows, key=lambda row: row["scenario_key"])

    assert pairs("one.jsonl") == pairs("two.jsonl")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [', "line 3: not JSON: Expecting value at column 15"),
        ("[1]", "line 3: not JSON"),
        ("3", "line 3: not an object"),
        ('{"messages": []}', "line 3: messages must be a list of messages; nothing was imported"),
        ("\x00", "line 3: not JSON"),
    ],
)
def test_one_wrong_line_and_nothing_is_imported(line: str, words: str, tmp_path: Path):
    good = json.dumps({"messages": [USER, FOUR]})
    if line == "[1]":
        words = "line 3: not an object; put one object on each line"
    with pytest.raises(MalformedFile) as caught:
        import_lines(tmp_path, good, "", line, good)
    assert words in str(caught.value)
    assert str(tmp_path / "in.jsonl") in str(caught.value)
    assert not (tmp_path / "new.db").exists()


def test_files_that_are_no_text(tmp_path: Path):
    file = tmp_path / "in.jsonl"
    for content, words in (
        (b'{"a": "\xff"}', "line 1: not UTF-8 at byte 7"),
        (b"PAR1 is how Parquet begins", "not Parquet that can be read"),
        (b"[" * 100_000, "line 1: not JSON that can be read"),
    ):
        file.write_bytes(content)
        with pytest.raises(MalformedFile, match=words):
            rows_of(file)


def test_marks_blank_lines_and_other_ends_of_lines(tmp_path: Path):
    line = json.dumps({"messages": [USER, FOUR]})
    store = import_lines(tmp_path, "\ufeff" + line + "\r", "  ", line.replace("4", "five"))
    assert store.read.counts()["trajectories"] == 2
    store.close()


def test_an_empty_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in.jsonl").write_text("\n")
    import_file(str(tmp_path / "in.jsonl"), store=f"sqlite:///{tmp_path}/new.db")
    assert "is empty; nothing was imported" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        import_file(str(tmp_path / "none.jsonl"), store=f"sqlite:///{tmp_path}/new.db")


def test_order_in_the_file_is_order_in_the_list(tmp_path: Path):
    lines = [json.dumps({"messages": [{"role": "user", "content": str(n)}, FOUR]}) for n in range(450)]
    store = import_lines(tmp_path, *lines)
    ids = [key for _, key in store.browse.ids(Filter(), limit=450)]
    assert [t.calls[0].messages[0]["content"] for t in store.read.trajectories(ids)] == [str(n) for n in range(450)]
    store.close()


def test_a_users_own_data_is_never_changed_by_an_import(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/new.db"
    store = open_store(url)
    write(store, tool_run("mine", "plum", "x", user_id="u"))
    before = store.read.trajectories(["mine"])
    export(str(tmp_path / "one.jsonl"), format="trajectories", store=url)
    changed = (tmp_path / "one.jsonl").read_text().replace('"user_id":"u"', '"user_id":"somebody else"')
    (tmp_path / "two.jsonl").write_text(changed)
    import_file(str(tmp_path / "two.jsonl"), store=url)
    assert store.read.trajectories(["mine"]) == before
    store.close()


def test_tokens_of_another_base_model_are_not_trained_on(tmp_path: Path):
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "other")]
    for url, base in zip(urls, ("sha-1", "sha-2"), strict=True):
        store = open_store(url)
        store.ledger.add_base("agent@0", "model", base, who="test")
        store.close()
    store = open_store(urls[0])
    run = tool_run("t", "plum", "x")
    write(store, replace(run, calls=tuple(replace(call, policy="agent@0") for call in run.calls)))
    store.close()
    export(str(tmp_path / "all.jsonl"), format="trajectories", store=urls[0])
    import_file(str(tmp_path / "all.jsonl"), store=urls[1])
    store = open_store(urls[1])
    assert [call.untrainable for call in store.read.trajectories(["t"])[0].calls] == ["imported"] * 2
    store.close()


def test_through_a_pipe(filled: Store, url: str, tmp_path: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch):
    export("-", store=url)
    captured = capfdbinary.readouterr()
    assert len(captured.out.splitlines()) == 7
    assert b"7 rows of 7 trajectories in stdout" in captured.err
    assert filled.transfers.exports()[0].path == "-"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(captured.out)))
    import_file("-", store=f"sqlite:///{tmp_path}/other.db")
    assert b"7 trajectories with 14 calls imported" in capfdbinary.readouterr().out


def test_memory_does_not_grow_with_the_store(url: str, tmp_path: Path):
    store = open_store(url)
    peaks: list[int] = []
    for many in (400, 1_200):
        for number in range(store.browse.count(Filter()), many):
            write(store, plain_run(f"t{number:05}", f"{number} " * 100, "answer " * 300, started_at=float(number)))
        export(str(tmp_path / "warm"), store=url, limit=1, force=True, as_json=True)
        tracemalloc.start()
        export(str(tmp_path / f"{many}.jsonl"), store=url, as_json=True)
        import_file(str(tmp_path / f"{many}.jsonl"), store=f"sqlite:///{tmp_path}/{many}.db", as_json=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    store.close()
    assert peaks[1] < 1.5 * peaks[0], peaks


def test_a_file_does_not_say_what_to_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    offer = {"target": "m:f", "args": [], "kwargs": {}}
    ours = tool_run("t", "plum", "x", metadata={"lang": "de", "replay": offer})
    again = tool_run("u", "plum", "y", metadata={"replay_of": "t"})
    pair = {"prompt": [USER], "chosen": [FOUR], "rejected": [{**FOUR, "content": "5"}], "replay": offer}
    rows = [{"messages": [USER, FOUR], "replay": offer, "replay_of": "t", "source": "mine"}, pair]
    rows += [encode(Bundle(run)) for run in (ours, again)]
    store = import_lines(tmp_path, *map(json.dumps, rows))
    words = "5 trajectories with 7 calls imported; 4 of them named a function to run again, which was left out\n"
    assert capsys.readouterr().out == words
    found = sorted(json.dumps(dict(run.info.metadata), sort_keys=True) for run in store.read.recent(limit=9))
    nothing = '{"replay": null}'
    assert found == [
        '{"lang": "de", "replay": null}', '{"replay": null, "source": "mine"}', nothing, nothing, "{}"
    ]  # fmt: skip
    write(store, tool_run(replay_id("t", 1), "plum", "z"))  # what the job made of it where it was recorded
    assert store.rights.erase(trajectory="t", who="ann", dry_run=True).trajectories == 2
    store.close()
