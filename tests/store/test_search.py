"""Finding runs by their text: what is found, what the index lacks, and that an erasure leaves no word of it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from art_patch.errors import ConfigError
from art_patch.store import Filter, Store, open_store
from art_patch.store import search_index as index
from art_patch.types import Choice
from tests.support.postgres import Execute
from tests.support.run_samples import fill
from tests.support.store_samples import call, info

ALL = Filter()
A, B = ("a2", "a1", "a0"), ("b2", "b1", "b0")


def said(key: str, *messages: str, at: float = 1.0, answer: str = "fine", run: str | None = None) -> list:
    """A run with one call; users and assistants speak by turns."""
    turns = tuple({"role": ("user", "assistant")[n % 2], "content": words} for n, words in enumerate(messages))
    choice = Choice(0, {"role": "assistant", "content": answer}, "stop")
    return [info(run or key), call(key, run or key, at, messages=turns, choices=(choice,))]


@pytest.fixture
def filled(store: Store) -> Store:
    fill(store)
    assert (store.search.lag(), store.search.extend(), store.search.lag()) == (15, 15, 0)
    return store


@pytest.mark.parametrize(
    ("queries", "ids"),
    [
        (["plum"], A),
        (["PLUM"], A),
        (["a is What"], ("failed", *B, *A)),
        (["what pear"], B),
        (["plum pear"], ()),
        (["31"], (*B, *A)),
        (['"is a plum"'], A),
        (['"plum a is"'], ()),
        (['cents "what is"'], ()),  # not said by one call
        (["cents", '"what is"'], (*B, *A)),  # but by two of the run
        (["pl*"], A),
        (["see you"], ("plain",)),
        (["hello"], ()),  # an answer that no call gave, in the history of the first
        (["brief"], ()),  # a system prompt
        (["lookup"], (*B, *A)),
        (["s"], ()),  # a copy that no user saw
    ],
)  # fmt: skip
def test_runs_are_found_by_what_they_say(filled: Store, queries: list[str], ids: tuple[str, ...]):
    found = filled.search.find(queries, ALL)
    assert (found.ids, found.more, found.lag) == (ids, False, 0)


def test_conditions_combine(filled: Store):
    find = filled.search.find
    assert find(["what"], Filter(user="user-b", session="session-1")).ids == ("b1",)
    assert find(["what"], Filter(status="error")).ids == ("failed",)
    assert find(["what"], Filter(until=1_050.0)).ids == A
    assert find(["what"], Filter(since=1_050.0, until=1_115.0)).ids == ("b1", "b0")
    assert find(["s"], Filter(shadows=True)).ids == ("shadow",)
    assert find([], ALL, tool="lookup").ids == (*B, *A)
    assert find(["pear"], ALL, tool="Lookup").ids == B
    assert find([], ALL, tool="look").ids == ()


def test_words_of_all_languages(store: Store):
    texts = {
        "french": "Où est le Café ÉLYSÉE?", "chinese": "我的订单在哪里?", "mail": "ask mia.b@example.com",
        "korean": "한국어", "digits": "order 1234-5678",
    }  # fmt: skip
    for key, text in texts.items():
        store.write(said(key, text))
    function = {"name": "get_order-2", "arguments": '{"deep": ["Banana"]}'}
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:secret"}}]
    answer = {
        "role": "assistant",
        "content": parts,
        "refusal": "never",
        "tool_calls": [{"id": "1", "function": function}],
    }
    store.write([info("tool"), call("tool", "tool", choices=(Choice(0, answer, "stop"),))])
    store.search.extend()

    def find(query: str, **more: str) -> tuple[str, ...]:
        return store.search.find([query] if query else [], ALL, **more).ids

    assert find("cafe elysee") == ("french",)
    assert find("订单") == find('"订单"') == ("chinese",)
    assert find("单订") == ()
    assert find("mia.b@example.com") == find("example") == ("mail",)
    assert find("com.example") == ()
    assert find("한국어") == ("korean",)
    assert find("1234-5678") == find("5678") == ("digits",)
    assert find("banana never see") == find("", tool="get_order-2") == ("tool",)
    assert find("secret") == ()
    for nothing in ("", "?!", '""', " * "):
        with pytest.raises(ConfigError, match="has no word to search for"):
            store.search.find([nothing], ALL)


def test_an_entry_has_what_is_new_in_its_call(store: Store):
    store.write(said("first", "one", answer="two", run="run", at=1.0))
    store.write(said("second", "one", "two", "three", answer="four", run="run", at=2.0))
    store.write(said("other", "one", "two", "five", answer="six", at=3.0))
    store.search.extend()
    found = {words: store.search.find([words], ALL).ids for words in ("one", "three four", "one three", "five")}
    assert found == {"one": ("run",), "three four": ("run",), "one three": (), "five": ("other",)}


def test_late_calls_are_found_by_a_thorough_extension(store: Store):
    store.write(said("new", "apple", at=10_000.0))
    assert store.search.extend(seconds=60) == 1
    store.write(said("late", "apple", at=9_500.0))
    assert (store.search.lag(), store.search.extend()) == (0, 1)
    store.write(said("very late", "apple", at=1_000.0))
    assert store.search.extend() == 0
    assert store.search.extend(thorough=True) == 1
    store.write(said("same time", "apple", at=10_000.0))
    assert (store.search.extend(), store.search.extend(thorough=True)) == (1, 0)
    assert store.search.find(["apple"], ALL).ids == ("same time", "new", "late", "very late")


def test_a_wrong_clock_hides_no_later_call(store: Store):
    store.write(said("future", "apple", at=9e9))
    store.search.extend()
    store.write(said("now", "apple", at=2e9))
    assert store.search.extend(seconds=60) == 1


def test_an_extension_that_is_short_of_time_says_what_it_lacks(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index, "_AT_ONCE", 2)
    for number in range(5):
        store.write(said(f"c{number}", "apple", at=10_000.0 * number))
    assert store.search.extend(seconds=0) == 0
    clock = iter((0.0, 0.5, 2.0))
    monkeypatch.setattr(index.time, "monotonic", lambda: next(clock))
    assert store.search.extend(seconds=1) == 2
    assert store.search.find(["apple"], ALL) == (type(store.search.find(["apple"], ALL)))(("c1", "c0"), False, 3)


def test_of_a_word_that_many_calls_say_the_newest_are_looked_at(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("art_patch.store.search.MOST", 3)
    monkeypatch.setattr("art_patch.store.search.MOST_READ", 2)
    for number in range(5):
        store.write(said(f"c{number}", "red apple", at=float(number)))
    store.search.extend()
    found = store.search.find(["apple"], ALL)
    assert (found.ids, found.more) == (("c4", "c3", "c2"), True)
    assert store.search.find(['"red apple"'], ALL).ids == ("c4", "c3")
    assert store.search.find(["apple"], Filter(until=2.0)).ids == ("c1", "c0")


def pages(store: Store, execute: Execute) -> bytes:
    """All bytes in which the index could keep a word."""
    if store._database.url.startswith("sqlite"):
        path = Path(store._database.url.removeprefix("sqlite:///"))
        with closing(sqlite3.connect(path)) as raw:
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            names = [name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE name LIKE 'search%'")]
            assert len(names) > 3, "the shadow tables of FTS5"
        return path.read_bytes()
    rows = execute("SELECT words::text FROM search_calls")
    execute("CHECKPOINT")
    ((file,),) = execute("SELECT pg_read_binary_file(pg_relation_filepath('search_calls_words'))")
    return repr(rows).encode() + bytes(file)


@pytest.mark.parametrize("how", ["user", "session", "trajectory", "age", "all"])
def test_no_word_outlives_its_run(store: Store, execute: Execute, how: str):
    theirs = [info("theirs", user_id="u", session_id="s"), *said("theirs", "my zyzzyva is heftig", at=2e9 - 1)[1:]]
    for number in range(30):  # in segments of their own
        store.write(said(f"c{number}", f"zyz{number} word", at=2e9 + number))
        store.search.extend()
        if number == 15:
            store.write(theirs)
    assert b"zyzzyva" in pages(store, execute) and store.search.find(["zyzzyva"], ALL).ids == ("theirs",)
    if how == "age":
        store.rights.prune(keep=29, now=3e9)  # it and another one were the first to end
    elif how == "all":
        store.search.drop()
    else:
        store.rights.erase(**{how: {"user": "u", "session": "s", "trajectory": "theirs"}[how]})
    if how == "all":
        assert (execute("SELECT count(*) FROM search_calls"), store.search.lag()) == ([(0,)], 31)
        return
    assert store.search.find(["zyzzyva"], ALL).ids == ()
    assert len(store.search.find(["word"], ALL).ids) == (29 if how == "age" else 30)
    assert b"zyzzyva" not in pages(store, execute) and b"heftig" not in pages(store, execute)
    assert store.verify() == []


def test_a_killed_merge_is_completed_by_the_next_extension(
    store: Store, execute: Execute, monkeypatch: pytest.MonkeyPatch
):
    store.write(said("one", "zyzzyva"))
    store.write(said("two", "apple"))
    store.search.extend()
    with monkeypatch.context() as patched:
        patched.setattr(index, "merge", lambda _: None)
        store.rights.erase(trajectory="one")
    store.search.extend()
    assert b"zyzzyva" not in pages(store, execute)


def test_a_store_without_an_index_is_erased_from_as_before(store: Store, execute: Execute):
    store.write(said("one", "apple"))
    assert store.search.find(["apple"], ALL) == type(store.search.find(["apple"], ALL))((), False, 1)
    assert store.rights.erase(trajectory="one").calls == 1


def test_two_projects_share_no_entry(store: Store, execute: Execute):
    url = store._database.url
    store.close()
    mine, theirs = (open_store(url, project=name) for name in ("mine", "theirs"))
    for each, word in ((mine, "apple"), (theirs, "pear")):
        each.write(said("same", f"{word} both"))
        each.search.extend()
    assert mine.search.find(["both"], ALL).ids == theirs.search.find(["both"], ALL).ids == ("same",)
    assert mine.search.find(["pear"], ALL).ids == theirs.search.find(["apple"], ALL).ids == ()
    theirs.rights.erase(trajectory="same")
    assert (mine.search.find(["both"], ALL).ids, theirs.search.find(["both"], ALL).ids) == (("same",), ())
    assert mine.verify() == []
    mine.close()
    theirs.close()


def test_a_call_that_was_erased_meanwhile_gets_no_entry(store: Store, monkeypatch: pytest.MonkeyPatch):
    store.write(said("one", "apple"))
    read = index.new_messages

    def erased_now(connection, keys):
        found = read(connection, keys)
        if found:
            monkeypatch.setattr(index, "new_messages", read)
            with closing(open_store(store._database.url)) as other:
                other.rights.erase(trajectory="one")
        return found

    monkeypatch.setattr(index, "new_messages", erased_now)
    assert store.search.extend() == 0
    assert store.verify() == []
