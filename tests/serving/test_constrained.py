"""Answers under `response_format` and a forced tool, sampled from a random model, which writes no JSON by itself."""

from __future__ import annotations

import asyncio
import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_patch.serving.embedded.chat_request import Grammars
from art_patch.serving.embedded.cohort import Sampler
from art_patch.serving.embedded.generation import SamplingParams
from art_patch.serving.request_checks import ApiError
from tests.support.asking import HELLO, LOOKUP_TOOL, PROOF, ask, assembled
from tests.support.engines import Running

llguidance = pytest.importorskip("llguidance", reason="pip install 'art-patch[serve]'")

WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
PERSON = {
    "type": "object",
    "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "string": {"type": "string", "maxLength": 12},
    "word": WORD,
    "integer": {"type": "integer", "minimum": -7, "maximum": 1234},
    "number": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "enum": {"enum": ["red", "green", 3, None, True, {"a": [1]}]},
    "const": {"const": {"a": 'quote " and \\ and ü and 漢'}},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email", "maxLength": 30},
    "person": PERSON,
    "titled": {"title": "T", "description": "d", "default": {}, "examples": [1], **PERSON},
    "optional": {"type": "object", "properties": {"a": WORD, "b": {"type": "null"}}, "additionalProperties": False},
    "nullable": {"anyOf": [WORD, {"type": "null"}]},
    "types": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    "list": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2},
    "empty": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [WORD, {"type": "boolean"}], "items": False, "minItems": 2},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "defs": {"$defs": {"P": PERSON}, "type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"],
             "additionalProperties": False},
    "tree": {"$defs": {"N": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/N"},
                                                          "maxItems": 2}]}}, "$ref": "#/$defs/N"},
    "allOf": {"allOf": [PERSON, {"type": "object", "properties": {"age": {"type": "integer", "maximum": 9}}}]},
    "oneOf": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    "kinds": {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, "x": value}, "required": ["kind", "x"],
         "additionalProperties": False}
        for kind, value in (("w", WORD), ("b", {"type": "boolean"}))
    ]},
    "multiple": {"type": "integer", "multipleOf": 25, "minimum": 0, "maximum": 100000},
    "object": {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "integer", "maximum": 9}},
}  # fmt: skip


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def choices(answer: Any) -> list[dict[str, Any]]:
    """Returns the choices of an answer, streamed or not, in the form of one that was not."""
    if isinstance(answer, dict):
        return answer["choices"]
    return [
        {"finish_reason": choice["reason"],
         "message": {"content": choice["content"] or None, "tool_calls": choice["calls"]}}
        for choice in assembled(answer)["choices"]
    ]  # fmt: skip


def asking(running: Running, **options: Any) -> Any:
    create: Any = running.openai.chat.completions.create
    answer = create(model="agent@1", messages=HELLO, **options)
    return answer if options.get("stream") else answer.to_dict()


def check(given: list[dict[str, Any]], schema: dict[str, Any]) -> int:
    """Returns how many of the choices ended by themselves; all of these follow the schema."""
    ended = [choice for choice in given if choice["finish_reason"] != "length"]
    for choice in ended:
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["message"]["content"])
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    return len(ended)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_is_sampled_follows_its_schema(running: Running, stream: bool) -> None:
    def of(number: int, schema: dict[str, Any]) -> int:
        asked = {"response_format": json_schema(schema), "n": 3, "seed": number, "max_tokens": 300}
        return check(choices(asking(running, stream=stream, **asked)), schema)

    with ThreadPoolExecutor(4) as pool:  # of several schemas in one batch
        ended = list(pool.map(of, range(len(SCHEMAS)), SCHEMAS.values()))
    assert sum(ended) > 0.8 * 3 * len(SCHEMAS)


scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, st.integers(-999, 999),
              st.integers(0, 10**6)),
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 8)),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(st.text(max_size=6), st.integers(), st.none()),
                                                        min_size=1, max_size=4, unique_by=repr)),
    st.sampled_from([WORD, {"type": "number", "minimum": -1, "maximum": 1}]),
)  # fmt: skip


def _object(properties: dict[str, Any], optional: int) -> dict[str, Any]:
    required = list(properties)[optional:]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3), st.integers(0, 2)),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.builds(lambda ways: {"anyOf": ways}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


def test_made_schemas_are_followed(running: Running) -> None:
    found: list[int] = []

    @settings(max_examples=26, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(schemas)
    def one(schema: dict[str, Any]) -> None:
        asked = {"response_format": json_schema(schema), "n": 2, "seed": 5, "max_tokens": 200}
        found.append(check(choices(ask(running.openai, "agent@2", **asked)), schema))

    one()
    assert sum(found) > len(found)


def test_json_object_greedy_and_cut_short(running: Running) -> None:
    asked = {"response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": 2, "n": 2}
    first, second = ask(running.openai, **asked)["choices"]
    assert (first["finish_reason"], first["message"]) == ("length", second["message"])
    assert first["message"]["content"].lstrip()[0] == "{"
    fixed: dict[str, Any] = {
        "response_format": json_schema({"const": {"a": "one two"}}),
        "temperature": 0,
        "max_tokens": 300,
    }
    assert json.loads(ask(running.openai, **fixed)["choices"][0]["message"]["content"]) == {"a": "one two"}
    cut = ask(running.openai, **fixed, stop=["two"])["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", "two")
    assert cut["message"]["content"].endswith('"one ')


TOOLS = [
    LOOKUP_TOOL,
    {"type": "function", "function": {"name": 'odd "name" \\ ü\n', "parameters": {
        "$defs": {"W": WORD}, "type": "object", "properties": {"w": {"$ref": "#/$defs/W"}}, "required": ["w"],
        "additionalProperties": False}}},
    {"type": "function", "function": {"name": "bare", "parameters": {"additionalProperties": False}}},
]  # fmt: skip


def called(choice: dict[str, Any]) -> list[str]:
    """Returns the names of the functions that a choice calls; their arguments follow the functions' schemas."""
    given = {tool["function"]["name"]: tool["function"] for tool in TOOLS}
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), given[call["name"]]["parameters"])
    return [call["name"] for call in calls]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", [tool["function"]["name"] for tool in TOOLS[1:]])
def test_a_named_function_is_called_once(running: Running, name: str, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": name}}
    answer = asking(running, tools=TOOLS, tool_choice=choice, n=3, seed=1, max_tokens=400, stream=stream)
    for call in choices(answer):
        assert (call["finish_reason"], called(call), call["message"].get("content")) == ("tool_calls", [name], None)


def test_a_required_call_is_any_of_the_tools(running: Running) -> None:
    asked = {"tools": TOOLS[1:], "tool_choice": "required", "n": 8, "seed": 1, "max_tokens": 300}
    several = [called(choice) for choice in ask(running.openai, **asked)["choices"]]
    assert all(several)
    assert len({name for names in several for name in names}) == 2
    once = [called(choice) for choice in ask(running.openai, parallel_tool_calls=False, **asked)["choices"]]
    assert {len(names) for names in once} == {1}


def test_beside_a_schema_tools_may_still_be_called(running: Running) -> None:
    asked = {"response_format": json_schema({"const": [1]}), "tools": TOOLS[2:], "n": 16, "seed": 2, "max_tokens": 99}
    answers = ask(running.openai, **asked)["choices"]
    said = [choice for choice in answers if choice["message"]["content"] and choice["finish_reason"] == "stop"]
    assert all(json.loads(choice["message"]["content"]) == [1] for choice in said)
    assert all(called(choice) for choice in answers if choice["finish_reason"] == "tool_calls")
    never = ask(running.openai, tool_choice="none", **asked)["choices"]
    assert not any(map(called, never))


ENORMOUS = {
    "allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": json_schema({"not": {"type": "string"}})}, 'Unimplemented keys: ["not"]'),
    ({"response_format": json_schema({"type": "object", "if": {}, "x-guidance": {"lenient": True}})}, "Unimplemented"),
    ({"response_format": json_schema({"type": "string", "pattern": "("})}, "regex parse error"),
    ({"response_format": json_schema({"$ref": "https://example.org/schema"})}, "example.org"),
    ({"response_format": json_schema(ENORMOUS)}, "too complex for this engine"),
    ({"response_format": json_schema({"enum": ["x" * 300_000]})}, "larger than"),
    ({"response_format": {"type": "json_schema"}}, "response_format = "),
    ({"response_format": {"type": "grammar"}}, "response_format = "),
    ({"tool_choice": "required"}, "names no function"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "names no function"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice = 'sometimes'"),
    ({"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}}, "ignore_eos"),
]


@pytest.mark.parametrize(("asked", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_followed_is_refused(running: Running, asked: dict[str, Any], words: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask, running.openai, max_tokens=5, extra_body={"ignore_eos": True})
        with pytest.raises(openai.BadRequestError) as refused:
            ask(running.openai, max_tokens=20, **asked)
        assert words in refused.value.message
        assert beside.result()["choices"][0]["finish_reason"] == "length"


def test_a_schema_that_grows_too_large_ends_its_own_answer(running: Running) -> None:
    many = {"type": "object", "properties": {f"p{at}": WORD for at in range(2500)}}
    schema = {"type": "array", "prefixItems": [{"const": 1}, many], "minItems": 2}
    with pytest.raises(openai.UnprocessableEntityError, match="too complex"):
        ask(running.openai, temperature=0, max_tokens=300, response_format=json_schema(schema))
    assert running.engine.healthy


def test_a_tokenizer_that_cannot_be_read_refuses_grammars(caplog: pytest.LogCaptureFixture) -> None:
    grammars = Grammars(object())
    assert "response_format and forced tools are refused" in caplog.text
    with pytest.raises(ApiError, match="answers cannot be constrained: ValueError"):
        asyncio.run(grammars.compile("start: /a/"))
    grammars.close()


def test_the_logprob_is_that_among_the_allowed_tokens(running: Running) -> None:
    schema, temperature = SCHEMAS["person"], 0.7
    asked = {"response_format": json_schema(schema), "temperature": temperature, "seed": 4, "max_tokens": 120}
    answer = ask(running.openai, **asked, **PROOF)
    ids = answer["choices"][0]["token_ids"]
    guidance = {"whitespace_pattern": r"[ \n\r\t]{0,32}"}
    grammar = "start: answer\nanswer: %json " + json.dumps({**schema, "x-guidance": guidance})
    matcher = llguidance.LLMatcher(running.engine._grammars._tokenizer, grammar)
    with torch.inference_mode():
        inputs = torch.tensor([answer["prompt_token_ids"] + ids])
        logits_TV = running.engine._model(input_ids=inputs).logits[0, -len(ids) - 1 : -1] / temperature
    for token, entry, logits_V in zip(ids, answer["choices"][0]["logprobs"]["content"], logits_TV, strict=True):
        mask = matcher.compute_bitmask()
        allowed = [at for at in range(8 * len(mask)) if mask[at // 8] >> at % 8 & 1]
        expected = logits_V[token] - torch.logsumexp(logits_V[allowed], 0)
        assert entry["logprob"] == pytest.approx(expected.item(), abs=1e-4)
        assert matcher.consume_token(token)


def test_free_rows_of_the_batch_stay_as_they_are(running: Running) -> None:
    free = {"seed": 9, "max_tokens": 40, "extra_body": {"ignore_eos": True, **PROOF["extra_body"]}, "logprobs": True}
    alone = ask(running.openai, **free)["choices"][0]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(6):
            pool.submit(ask, running.openai, response_format={"type": "json_object"}, max_tokens=60)
        among = [pool.submit(ask, running.openai, **free) for _ in range(2)]
        for answer in among:
            choice = answer.result()["choices"][0]
            assert choice["token_ids"] == alone["token_ids"]
            for mine, theirs in zip(choice["logprobs"]["content"], alone["logprobs"]["content"], strict=True):
                assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)


def test_a_mask_reaches_its_row_alone() -> None:
    logits = torch.randn(4, 13, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5), SamplingParams()]

    def draw(masks: dict[int, bytes]) -> tuple[list[int], list[float]]:
        noises = [torch.Generator().manual_seed(row) for row in range(4)]
        return Sampler(params, noises, torch.device("cpu")).sample(logits, masks)

    before, (free_ids, free_logprobs) = logits.clone(), draw({})
    ids, logprobs = draw({1: bytes([0b0100, 0]), 3: bytes(2)})
    assert (ids[0], ids[2], logprobs[0], logprobs[2]) == (free_ids[0], free_ids[2], free_logprobs[0], free_logprobs[2])
    assert (ids[1], logprobs[1]) == (2, 0.0)
    assert math.isnan(logprobs[3])  # no token is allowed
    assert torch.equal(logits, before)
    drawn = {draw({0: bytes([0b10000001, 0b10000])})[0][0] for _ in range(20)}
    assert drawn <= {0, 7, 12}
