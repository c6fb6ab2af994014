"""The champion's bytes become the bytes that the app expects, however they arrive."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.patching.disguise import Disguise, StreamDisguise
from art_patch.recording.sse import assemble, events
from tests.servers import chunks


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
    disguise = Disguise("shop@1", "gpt-x", n, keeps_logprobs=False, keeps_token_ids=False)
    whole, cut = StreamDisguise(disguise), StreamDisguise(disguise)
    expected = whole.feed(wire) + whole.end()
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert b"".join(cut.feed(piece) for piece in pieces) + cut.end() == expected
    plain = assemble(events(b"".join(chunks(body | {"logprobs": False, "return_token_ids": False}))))
    ours = assemble(events(expected))
    assert ours.body == plain.body | {"model": "gpt-x"}


@pytest.mark.parametrize("text", ["\\ud83d\\ude00", "\\ud800", "\\u0000", "é"])
def test_disguise_keeps_any_text(text):
    choice = f'{{"index": 0, "message": {{"content": "{text}"}}, "finish_reason": "stop"}}'
    body = f'{{"model": "shop@1", "choices": [{choice}]}}'
    out = Disguise("shop@1", "gpt-x", 1, keeps_logprobs=False, keeps_token_ids=False).whole(body.encode())
    assert json.loads(out)["choices"] == json.loads(body)["choices"]
