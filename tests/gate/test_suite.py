"""The frozen suite: what a file may say, and what is said of one that may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from art_patch.errors import ConfigError
from art_patch.gate import read_suite

HI = {"role": "user", "content": "hi"}


def write(directory: Path, *lines: object) -> Path:
    path = directory / "suite.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_each_line_is_a_prompt(tmp_path: Path):
    answered = {"messages": [HI, {"role": "assistant", "content": "hello"}], "name": "greeting"}
    tool = {"type": "function", "function": {"name": "lookup"}}
    path = write(tmp_path, answered, "", {"messages": [HI], "tools": [tool], "temperature": 0, "max_tokens": 8})
    first, second = read_suite(path)
    assert (first.scenario_key, first.call.messages, first.call.tools) == ("suite:greeting", (HI,), ())
    assert (second.scenario_key, second.call.tools) == ("suite:3", (tool,))
    assert second.call.params == {"temperature": 0, "max_tokens": 8}
    assert second.call.prompt_token_ids is None  # nothing to compare the engine's rendering with


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "has no prompts"),
        (["{"], "line 1 .* is not JSON"),
        (["[]"], "line 1 .* is not a JSON object"),
        ([{"messages": [HI]}, {"prompt": "hi"}], "line 2 .* has 'prompt', which would not be sent"),
        ([{"messages": "hi"}], "'messages' is a list"),
        ([{"messages": [{"content": "hi"}]}], "no prompt"),
        ([{"messages": [{"role": "assistant", "content": "hi"}]}], "no prompt"),
        ([{"messages": [HI], "tools": {}}], "'tools' is a list"),
        ([{"messages": [HI], "name": "a"}, {"messages": [HI], "name": "a"}], "two prompts .* named 'a'"),
    ],
)
def test_what_is_no_suite_is_refused_with_the_line(tmp_path: Path, lines: list[object], words: str):
    with pytest.raises(ConfigError, match=words):
        read_suite(write(tmp_path, *lines))


def test_a_suite_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_suite(tmp_path / "none.jsonl")
