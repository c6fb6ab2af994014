from __future__ import annotations

from pathlib import Path

import pytest

from art_patch.errors import ConfigError
from art_patch.rewards import DEFAULT_RUBRIC, Rubric, load_rubric


@pytest.mark.parametrize("nothing", [None, "", "  \n"])
def test_nothing_means_the_published_default(nothing: str | None) -> None:
    assert load_rubric(nothing) is DEFAULT_RUBRIC


def test_text_is_taken_as_it_is_and_a_file_is_read(tmp_path: Path) -> None:
    text = "Prefer short answers.\nBé kind."
    file = tmp_path / "my rubric.md"
    file.write_text(text, "utf-8")
    assert load_rubric(text) == load_rubric(file) == load_rubric(str(file)) == Rubric(text)


def test_the_version_follows_the_text_alone() -> None:
    assert Rubric("a").version == Rubric("a").version != Rubric("b").version
    assert len(DEFAULT_RUBRIC.version) == 12


def test_what_cannot_be_read_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty.md").write_text(" \n")
    (tmp_path / "latin.md").write_bytes(b"caf\xe9")
    for given in (
        "no-such-rubric.md",
        "bad\0name",
        "x" * 5000,
        tmp_path / "a b missing",
        tmp_path / "empty.md",
        tmp_path / "latin.md",
    ):
        with pytest.raises(ConfigError, match="rubric"):
            load_rubric(given)


def test_a_long_text_is_no_file_name() -> None:
    assert load_rubric("be fair " * 1000).text.startswith("be fair")
