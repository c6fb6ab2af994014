"""Prompt ids: cut into blocks, shared where prompts begin alike, read back exactly."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from art_patch.store import open_store
from art_patch.store.schema.codec import BLOCK, block_id, blocks, ids_of, pack_ids, rest, uint32, unpack_ids
from art_patch.types import Call, TrajectoryInfo

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=3 * BLOCK)


@settings(deadline=None)
@given(IDS)
def test_ids_come_back(ids):
    assert unpack_ids(pack_ids(ids)) == tuple(ids)


@settings(deadline=None)
@given(IDS)
def test_blocks_and_rest_are_the_ids(ids):
    above, parts = b"", []
    for block, parent, part in blocks(uint32(ids)):
        assert parent == above and block == block_id(parent, part) and len(part) == 4 * BLOCK
        above = block
        parts.append(part)
    assert ids_of(b"".join(parts) + rest(uint32(ids))) == tuple(ids)


@settings(deadline=None)
@given(IDS, IDS, IDS)
def test_prompts_that_begin_alike_share_blocks(first, one, other):
    left = [block for block, _, _ in blocks(uint32(first + one))]
    right = [block for block, _, _ in blocks(uint32(first + other))]
    alike = next((n for n, (a, b) in enumerate(zip(first + one, first + other, strict=False)) if a != b), None)
    if alike is None:
        alike = min(len(first + one), len(first + other))
    shared = alike // BLOCK
    assert left[:shared] == right[:shared]
    assert not set(left[shared:]) & set(right[shared:])


@settings(deadline=None, max_examples=20)
@given(st.lists(IDS, min_size=1, max_size=4))
def test_a_store_gives_the_prompts_of_a_conversation_back(tmp_path_factory, turns):
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('ids')}/store.db")
    ids, calls = [], []
    for number, turn in enumerate(turns):
        ids = ids + turn
        calls.append(Call(f"c{number}", "t", float(number), "m", (), prompt_token_ids=tuple(ids)))
    store.write([TrajectoryInfo("t", 0.0), *calls[:1]])
    store.write(calls[1:])
    (trajectory,) = store.read.trajectories(["t"])
    assert trajectory.calls == tuple(calls)
    assert store.verify() == []
    store.close()
