"""The champion's bytes become the bytes that the app expects, however they arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.patching.rewriting.response_rewriter import ResponseRewriter, StreamRewriter
from art_patch.recording.chat import assemble, events
from tests.support.growth import too_steep
from tests.support.servers import chunks


@given(st.data(), st.integers(1, 3), st.booleans())
def test_disguise_does_not_depend_on_how_the_network_cuts(data, n, usage):
    body = {
        "model": "shop@1",
        "logprobs": True,
        "return_token_ids": True,
        "n": n,
        "stream_options": {"include_usage": usage},
    }
    wire = b"".join(chunks(body))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    rewriter = ResponseRewriter("shop@1", "gpt-x", n, keeps_logprobs=False, keeps_token_ids=False)
    whole, cut = StreamRewriter(rewriter), StreamRewriter(rewriter)
    expected = whole.feed(wire) + whole.end()
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert b"".join(cut.feed(piece) for piece in pieces) + cut.end() == expected
    plain = assemble(events(b"".join(chunks(body | {"logprobs": False, "return_token_ids": False}))))
    ours = assemble(events(expected))
    assert ours.body == plain.body | {"model": "gpt-x", "system_fingerprint": "shop@1"}


@pytest.mark.parametrize("text", ["\\ud83d\\ude00", "\\ud800", "\\u0000", "é"])
def test_disguise_keeps_any_text(text):
    choice = f'{{"index": 0, "message": {{"content": "{text}"}}, "finish_reason": "stop"}}'
    body = f'{{"model": "shop@1", "choices": [{choice}]}}'
    out = ResponseRewriter("shop@1", "gpt-x", 1, keeps_logprobs=False, keeps_token_ids=False).whole(body.encode())
    assert json.loads(out)["choices"] == json.loads(body)["choices"]


@pytest.mark.parametrize("text", ["Hello", ',"token_ids":[1]', '],"logprobs":{"content":[]},"finish_reason":"length"'])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("gap", ["", " "])
def test_what_is_cut_out_unread_is_what_the_app_does_not_get(text, n, gap):
    def choice(index: int, proof: bool) -> dict[str, Any]:
        said = {"index": index, "message": {"role": "assistant", "content": text}, "logprobs": None}
        if proof:
            said["logprobs"] = {"content": [{"token": "]", "logprob": -0.5, "bytes": [93]}]}
        return said | {"finish_reason": "stop"} | ({"stop_reason": None, "token_ids": [7, 8]} if proof else {})

    head = {"id": "chatcmpl-1", "model": "shop@1", "choices": [choice(index, True) for index in range(n)]}
    tail = {"usage": {"total_tokens": 9}, "prompt_token_ids": [1, 2, 3], "last": [4]}
    body = json.dumps(head | tail, separators=("," + gap, ":" + gap)).encode()
    out = json.loads(ResponseRewriter("shop@1", "gpt-x", n, keeps_logprobs=False, keeps_token_ids=False).whole(body))
    assert out == {
        "id": "chatcmpl-1",
        "model": "gpt-x",
        "choices": [choice(index, False) for index in range(n)],
        "usage": {"total_tokens": 9},
        "last": [4],
        "system_fingerprint": "shop@1",
    }


@pytest.mark.parametrize("key", ["message", "delta"])
def test_what_vllm_adds_and_leaves_empty_does_not_reach_the_app(key: str):
    said = {"role": "assistant", "content": "Hi", "refusal": None, "reasoning": None, "annotations": None}
    choice = {"index": 0, key: said | {"audio": None, "function_call": None}, "finish_reason": "stop"}
    answer = {"model": "shop@1", "choices": [choice | {"stop_reason": None, "routed_experts": None}]}
    answer |= {"prompt_logprobs": None, "kv_transfer_params": None, "metrics": None, "service_tier": None}
    ResponseRewriter("shop@1", "gpt-x", 1, keeps_logprobs=False, keeps_token_ids=False).strip(answer)
    assert answer == {
        "model": "gpt-x",
        "system_fingerprint": "shop@1",
        "service_tier": None,
        "choices": [
            {"index": 0, key: {"role": "assistant", "content": "Hi", "refusal": None}, "finish_reason": "stop"}
        ],
    }


def test_what_vllm_adds_and_fills_stays():
    said = {"role": "assistant", "content": "Hi", "reasoning": "because"}
    answer = {"choices": [{"message": said, "stop_reason": "\n", "finish_reason": "stop"}]}
    ResponseRewriter("shop@1", "gpt-x", 1, keeps_logprobs=False, keeps_token_ids=False).strip(answer)
    assert answer["choices"] == [{"message": said, "stop_reason": "\n", "finish_reason": "stop"}]


def test_a_long_line_in_many_pieces_takes_linear_time():
    def feed(wire: bytes) -> None:
        stream = StreamRewriter(ResponseRewriter("shop@1", "gpt-x", 1, keeps_logprobs=False, keeps_token_ids=False))
        for at in range(0, len(wire), 10):
            stream.feed(wire[at : at + 10])

    assert too_steep(feed, lambda size: b"data: " + b"x" * size, (10_000, 100_000, 1_000_000, 4_000_000)) is None
