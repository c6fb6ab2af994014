"""DSPy by its callbacks: a program is one trajectory, with modules, tools, and answers that could not be parsed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import environment, run_app
from tests.support.recorded import store_url, trajectories, tree
from tests.support.servers import Answer, completion, serving

FULL = bool(os.environ.get("ART_PATCH_FULL"))
pytestmark = [
    pytest.mark.skipif(not FULL, reason="needs DSPy's packages; ART_PATCH_FULL=1 runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

REACT = "at, trajectory -> next_thought, next_tool_name, next_tool_args"
TREE = [
    "span Guide",
    "  agent ReAct(Colour)",
    "    span ChainOfThought",
    "      span Predict(at, trajectory -> reasoning, colour)",
    "        call gpt-guide",
    "        call gpt-guide",
    f"    span Predict({REACT})",
    "      call gpt-guide",
    f"    span Predict({REACT})",
    "      call gpt-guide",
    "    tool finish",
    "    tool look",
    "  span Predict(colour -> rhyme)",
    "    call gpt-guide",
]


def answer(body: Any, path: str = "") -> Answer:
    """Looks once, then ends; names the colour only in JSON."""
    said = "\n".join(str(message["content"]) for message in body["messages"])
    asked = said.rpartition("[[ ## ")[0].rpartition("Respond with")[2] or said[-600:]
    fields: dict[str, str] = {"colour": "green" if "grass" in said else "blue"}
    if "next_tool_name" in asked:
        ended = "the sky is blue" in said
        fields = {"next_thought": "t", "next_tool_name": "finish" if ended else "look"}
        fields["next_tool_args"] = "{}" if ended else '{"at": "sky"}'
    elif "rhyme" in asked:
        fields = {"rhyme": "true"}
    elif "reasoning" in asked:
        fields = {"reasoning": "r", **fields}
        text = json.dumps(fields) if "response_format" in body or "JSON" in said else "I cannot say."
        return Answer(body=json.dumps(completion(body, content=text)).encode())
    text = "".join(f"[[ ## {name} ## ]]\n{value}\n" for name, value in fields.items()) + "[[ ## completed ## ]]"
    return Answer(body=json.dumps(completion(body, content=text)).encode())


@pytest.mark.parametrize(
    "wanted",
    [
        ["dspy==3.0.0", "litellm>=1.80,!=1.82.7,!=1.82.8"],
        ["dspy>=3.4,<4", "litellm>=1.106,<2", "mcp>=2,<3"],
    ],
    ids=["oldest", "newest"],
)
def test_a_program_is_one_trajectory(tmp_path: Path, wanted: list[str]):
    python = environment("dspy", wanted)
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = answer
        told = run_app(python, "dspy_app.py", url, server.url)
    assert "integration dspy" in told["instrumented"]
    assert (told["errors"], told["bypasses"], told["heard"]) == ({}, {}, 10)
    guide, *judged = trajectories(url)
    assert tree(guide) == TREE
    assert (guide.info.name, guide.info.origin) == ("Guide", "explicit")
    steps = {span.name: span for span in guide.spans}
    assert (steps["look"].attributes, steps["look"].error) == (
        {"input": {"at": "sky"}, "output": "the sky is blue"},
        None,
    )
    assert steps["Guide"].attributes == {"input": {"at": "sky"}, "output": {"rhyme": "true"}}
    [score] = guide.scores
    assert (score.name, score.value, "I cannot say." in (score.comment or "")) == ("valid", 0.0, True)
    assert [tree(each) for each in judged] == [["span Predict(Colour)", "  call gpt-eval"]] * 2
    found = {each.spans[0].attributes["input"]["at"]: each.scores for each in judged}
    assert {at: [(score.name, score.value) for score in scores] for at, scores in found.items()} == {
        "sky": [("exact", 1.0)], "grass": [("exact", 0.0)],
    }  # fmt: skip
