"""LangChain and LangGraph: one run of a graph, one trajectory, with its nodes, tools and what a person was asked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from art_patch.types import Trajectory
from tests.support.environments import ENVIRONMENT, ROOT, environment, run_app
from tests.support.recorded import store_url, trajectories, tree
from tests.support.servers import Answer, chunks, completion, response, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SERVER = ("fastapi>=0.115,<1", "httpx>=0.27,<1", "uvicorn>=0.34,<1")
NEWEST = ("langchain>=1.4,<2", "langchain-openai>=1.7,<2", "langgraph>=1.2,<2", "openai>=3,<4")
OLDEST = ("langchain-core==0.3.*", "langchain-openai==0.3.*", "langgraph==0.3.*", "openai>=1.66,<2")
GIVEN = {"look": {"at": "sea"}, "weigh": {"thing": "sky"}, "refund": {"parcel": "17"}}
AGENT = ROOT / "examples/frameworks/langgraph/agent.py"
AFTER_UNPATCHING = 3  # calls


def answer(body: Any, path: str = "") -> Answer:
    """Ask for every tool once, then talk."""
    if "input" in body:
        return Answer(body=json.dumps(response(body)).encode())
    names = [tool["function"]["name"] for tool in body.get("tools") or ()]
    plain = {key: value for key, value in body.items() if key != "tools"}
    if names and not any(message["role"] == "tool" for message in body["messages"]):
        return asking(plain, names)
    if body.get("stream"):
        return Answer(events=chunks(plain))
    content = '{"name": "blue"}' if body.get("response_format") else None
    return Answer(body=json.dumps(completion(plain, content=content)).encode())


def asking(body: Any, names: list[str]) -> Answer:
    """An answer with a call of each tool."""
    calls = [
        {"index": at, "id": f"call_{name}", "type": "function"}
        | {"function": {"name": name, "arguments": json.dumps(GIVEN[name])}}
        for at, name in enumerate(names)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    whole = completion(body, finish="tool_calls")
    (choice,) = whole["choices"]
    if not body.get("stream"):
        choice["message"] = message
        return Answer(body=json.dumps(whole).encode())
    chunk = whole | {"object": "chat.completion.chunk", "usage": None}
    chunk["choices"] = [{"index": 0, "delta": message, "finish_reason": "tool_calls"}]
    return Answer(events=[b"data: " + json.dumps(chunk).encode() + b"\n\n", b"data: [DONE]\n\n"])


ARTIST = [
    "agent artist",
    "node answer",
    "  call gpt-answer",
    "node checker",
    "  call gpt-checker",
    "node confirm",
    "node confirm",
    "node critic",
    "  agent criticism",
    "    node judge",
    "      call gpt-judge",
    "node planner",
    "  call gpt-planner",
    "node tools",
    "  tool look",
    "  tool weigh",
]
TRACED = [
    "agent artist",
    "  node checker",
    "    call gpt-checker",
    "  node confirm",
    "  node critic",
    "    agent criticism",
    "      node judge",
    "        call gpt-judge",
    "  node planner",
    "    call gpt-planner",
    "  node tools",
    "    tool look",
    "    tool weigh",
    "agent artist",  # resumed, in another trace
    "  node answer",
    "    call gpt-answer",
    "  node confirm",
]
FORMS = [
    "agent forms",
    "node batch",
    "  call gpt-batch",
    "  call gpt-batch",
    "node responses",
    "  call gpt-responses",
    "node sdk",
    "  call gpt-sdk",
    "node several",
    "  call gpt-several",
    "  call gpt-several",
    "node shelf",
    "  retrieval Shelf",
    "node stream",
    "  call gpt-stream",
    "node structured",
    "  call gpt-structured",
]
PAINTER = [
    "agent painter",
    "node model",
    "  call gpt-agent",
    "node model",
    "  call gpt-agent",
    "node tools",
    "  tool look",
]
MINE = [
    "agent court",
    "  node judge",
    "    call gpt-judge",
    "call gpt-reader",
    "tool look",
]
SUPPORT = [
    "agent support",
    "node think",
    "  call gpt-5-mini",
    "node think",
    "  call gpt-5-mini",
    "node tools",
    "  tool refund",
    "node tools",
    "  tool refund",
]


def said(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    """Messages as they are shown."""
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize("asked", [NEWEST, OLDEST], ids=["newest", "oldest"])
def test_a_graph_is_one_trajectory(tmp_path: Path, asked: tuple[str, ...]):
    python = environment("langchain", [*asked, *SERVER])
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = answer
        told = run_app(python, "langchain_app.py", url, server.url)
        sent = [seen.body["model"] for seen in server.seen][:-AFTER_UNPATCHING]
    assert told["instrumented"][1:] == ["integration langchain_core"]
    assert (told["errors"], told["bypasses"]) == ({}, {})
    found = trajectories(url)
    assert sorted(call.requested_model for each in found for call in each.calls) == sorted(sent)
    agents = [("painter", PAINTER)] * 2 if asked is NEWEST else []
    trees = [("artist", ARTIST), ("artist", TRACED), *[("artist", ARTIST)] * 2, *agents, ("forms", FORMS)]
    trees += [("LangGraph", ["agent LangGraph", "node flow", "  node ask", "    call gpt-task"])]
    trees += [("reader", ["node read", "  call gpt-reader"]), (None, ["call gpt-reader"])]
    assert [(each.info.name, tree(each)) for each in found] == [*trees, ("mine", MINE)]
    visits = {each.info.session_id: each for each in found if each.info.name == "artist"}
    assert set(visits) == {f"visit-{number}" for number in (1, 2, 3, 4)}
    for visit in visits.values():
        check_visit(visit)
    first = visits["visit-1"].info
    assert (first.user_id, first.tags, first.metadata) == ("ann", ("vip",), {"lang": "de"})
    check_failures(found)


def check_visit(visit: Trajectory) -> None:
    """Look at what was kept of a run that a person interrupted."""
    assert visit.info.error is None
    assert (visit.info.ended_at is None) == (visit.info.origin == "otel")  # nobody says when a trace ends
    steps = {
        span.name: span for span in sorted(visit.spans, key=lambda span: span.started_at) if span.name != "confirm"
    }
    asked, resumed = sorted((span for span in visit.spans if span.name == "confirm"), key=lambda span: span.started_at)
    assert asked.error is None and asked.attributes["output"]["interrupt"][0]["value"] == {"sure": "?"}
    assert resumed.attributes == {"output": {"messages": [["user", "yes"]]}}
    look = {"input": GIVEN["look"], "tool_call_id": "call_look", "output": "the sea is blue"}
    assert (steps["look"].attributes, steps["look"].error) == (look, None)
    # Old ones tell which call it was with the result alone.
    weigh = {"tool_call_id": "call_weigh"} | steps["weigh"].attributes
    assert weigh == {"input": GIVEN["weigh"], "tool_call_id": "call_weigh"}
    assert steps["weigh"].error == "ValueError: too heavy"
    outcome = steps["artist"].attributes["output"]["messages"]
    assert outcome[-2:] == said(("human", "yes"), ("ai", "Hello there!"))
    assert [message["role"] for message in outcome] == ["human", "ai", "tool", "tool", "ai", "ai", "human", "ai"]


def check_failures(found: list[Trajectory]) -> None:
    """Look at what could not be read, and what failed."""
    by_name = {each.info.name: each for each in found}
    scores = [(each.info.name, score.name, score.value) for each in found for score in each.scores]
    assert scores == [("reader", "valid", 0.0), ("mine", "valid", 0.0)]
    assert str(by_name["mine"].scores[0].comment).startswith("Invalid json output: Hello there!")
    (failed,) = by_name["reader"].spans
    assert (failed.name, failed.error, by_name["reader"].info.error) == ("read", "KeyError: 'lost'", "KeyError: 'lost'")
    (retrieved,) = [span for span in by_name["forms"].spans if span.kind == "retrieval"]
    documents = [{"content": "about colours", "metadata": {"page": 1}}]
    assert retrieved.attributes == {"input": "colours", "output": documents}


@pytest.mark.parametrize("line", [False, True], ids=["art-patch run", "one line"])
def test_the_example_is_recorded_as_it_is(tmp_path: Path, line: bool):
    python = environment("langchain", [*NEWEST, *SERVER])
    text = AGENT.read_text()
    if line:
        text = text.replace("import os\n", "import art_patch; art_patch.patch()\nimport os\n", 1)
    (tmp_path / "agent.py").write_text(text)
    command = [python, *([] if line else ["-m", "art_patch", "run", "--", python]), tmp_path / "agent.py"]
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = lambda body, path: (
            asking(body, ["refund"]) if len(server.seen) == 1 else answer({"model": "m", "messages": []})
        )
        variables = {"ART_PATCH_STORE": url, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "sk-test"}
        done = subprocess.run(
            command, input="yes\n", capture_output=True, text=True, timeout=120, env={**ENVIRONMENT, **variables}
        )
    assert (done.returncode, done.stdout) == (0, "Refund parcel 17? (yes/no) Hello there!\n"), done.stderr
    (found,) = trajectories(url)
    assert tree(found) == SUPPORT
    assert [span.attributes.get("output") for span in found.spans if span.name == "refund"][-1] == "refunded"


def test_rollouts_as_scripts_for_openpipe_art_have_them(tmp_path: Path):
    python = environment("langchain", [*NEWEST, *SERVER])
    with serving() as server:
        server.answer = answer
        told = run_app(python, "langchain_rollouts_app.py", store_url(tmp_path), server.url)
        asked = [(seen.body["model"], seen.body["temperature"]) for seen in server.seen]
    assert asked == [("learner", 0.7)] * 3
    refused = told.pop("refused")
    assert told == {
        "reward": 0.5,
        "choices": 3,
        "roles": [["user", "assistant", "tool", "assistant"], ["user", "assistant"]],
        "tools": [1, None],
        "errors": {},
    }
    assert [said.split()[0] for said in refused] == ["a", "in", "whose"]
