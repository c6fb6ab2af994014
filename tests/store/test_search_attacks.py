"""What strangers may say and ask for must not stop the search index, or act in a query."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from art_patch.errors import ConfigError
from art_patch.store import Filter, Store
from art_patch.types import Choice
from tests.support.store_samples import call, info

ALL = Filter()


def write(store: Store, key: str, *said: str, at: float = 1.0, **answer: Any) -> None:
    message = {"role": "assistant", "content": "fine", **answer}
    messages = tuple({"role": "user", "content": text} for text in said or ("plum",))
    store.write([info(key), call(key, key, at, messages=messages, choices=(Choice(0, message, "stop"),))])


def test_a_tool_with_an_endless_name_does_not_stop_the_index(store: Store):
    name = "_".join(f"part{number}" for number in range(2_000))
    write(store, "long", tool_calls=[{"id": "1", "function": {"name": name, "arguments": "{}"}}])
    write(store, "next", at=2.0)
    assert store.search.extend() == 2
    assert store.search.find(["plum"], ALL).ids == ("next", "long")
    assert store.search.find([], ALL, tool=name).ids == ("long",)
    assert store.search.find([], ALL, tool="part0").ids == ()


def test_of_a_call_that_says_more_than_an_entry_holds_the_newest_words_are_found(store: Store):
    texts = [" ".join(f"w{turn}x{number:07}{'a' * 20}" for number in range(6_000)) for turn in range(12)]
    write(store, "long", *texts, content="plum")
    write(store, "next", at=2.0)
    assert store.search.extend() == 2
    assert store.search.find(["plum"], ALL).ids == ("next", "long")
    assert store.search.find([f"w11x0000001{'a' * 20}"], ALL).ids == ("long",)
    assert store.search.find([f"w0x0000001{'a' * 20}"], ALL).ids == ()
    store.rights.erase(trajectory="long")
    assert store.search.find(["plum"], ALL).ids == ("next",)
    assert store.verify() == []


@pytest.mark.parametrize(
    ("query", "is_found"),
    [
        ('plum" OR 1 --', False), ("words:plum", False), ("NEAR(plum fine)", False), ("plum AND NOT fine", False),
        ("^plum", True), ("plum') OR ('", False), ("'plum' & !'x'", False), ("plum:*", True), ("plum\0", True),
        ("plum\\", True), ("plum <-> fine", True), ("\ud800 plum", True), ("\uff07plum\uff07", True),
        ("\U0001d491\U0001d48d\U0001d496\U0001d48e", True), ("%plum%", True), ("_", None), ("%", None), ("\\", None),
        ("'", None), ('"""', None), ("\ud800", None),
    ],
)  # fmt: skip
def test_a_query_is_words_and_no_language(store: Store, query: str, is_found: bool | None):
    write(store, "run")
    store.search.extend()
    if is_found is None:
        with pytest.raises(ConfigError, match="has no word to search for"):
            store.search.find([query], ALL)
    else:
        assert store.search.find([query], ALL).ids == (("run",) if is_found else ())
    assert store.search.find([], ALL, tool=query).ids == ()


@pytest.mark.parametrize(
    "query",
    [
        " ".join(f"w{number}" for number in range(150_000)),
        " ".join(f"w{number}*" for number in range(150_000)),
        '"' + " ".join(f"w{number}" for number in range(150_000)) + '"',
        "".join(chr(0x4E00 + number) for number in range(20_000)),
    ],
    ids=["words", "beginnings", "a phrase", "Chinese"],
)
def test_a_query_of_too_many_words_is_refused(store: Store, query: str):
    write(store, "run")
    store.search.extend()
    with pytest.raises(ConfigError, match="has more than 100 words"):
        store.search.find([query], ALL)
    # However long, what is few words is looked for.
    assert store.search.find(['"' * 1_000_000 + "plum", "plum" * 200_000 + " plum"], ALL).ids == ()


def test_large_messages_are_not_in_memory_all_at_once(store: Store):
    size, count = 500_000, 200
    for number in range(count):
        write(store, f"run{number}", f"{number} " + "plum " * (size // 5), at=float(number))
    tracemalloc.start()
    try:
        assert store.search.extend() == count
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size * count / 2
