"""Chains of messages: what names a message, and what is kept of it."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from art_patch.trajectories import ROOT, canonical, chain, node_id, verbatim

TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates and all
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(st.dictionaries(TEXT, TEXT, max_size=4) | st.dictionaries(TEXT, JSON, max_size=4), max_size=4)


@settings(deadline=None)
@given(MESSAGES)
def test_a_chain_names_each_message_by_what_it_says_and_what_came_before(messages):
    parent = ROOT
    for link, message in zip(chain(messages), messages, strict=True):
        assert link == (node_id(parent, message), parent, verbatim(message))
        assert json.loads(link.body) == message
        assert list(json.loads(link.body)) == list(message)
        parent = link.node


@settings(deadline=None)
@given(MESSAGES)
def test_the_order_of_keys_and_what_is_empty_do_not_count(messages):
    for message in messages:
        echo = {"refusal": None, "name": "", "parts": []} | dict(reversed(message.items()))
        assert canonical(echo) == canonical(message)


def test_the_name_of_a_message_stays_what_it_is():
    """Stores hold it: another name for the same message would tear their conversations."""
    named = {
        "plain": {"role": "user", "content": "What is 3 \u00d7 4?\n\x7f"},
        "tool calls": {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "n": 1.5}]},
    }
    assert {what: node_id(b"above", message).hex() for what, message in named.items()} == {
        "plain": "2b6eabb76a35ce6566e4a9b706aae1bc",
        "tool calls": "872eede8d39147bda75b362f27123333",
    }
