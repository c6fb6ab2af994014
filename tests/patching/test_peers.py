"""Beside other instrumentations, in both orders: the app gets what they alone give it, and we record each call once.

They patch the SDK for the whole process and for good, so each runs in a process of its own (`peers_app`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.patching.peers_app import PEERS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def run(peer: str, order: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.patching.peers_app", peer, order]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("order", ["peer_first", "patch_first"])
@pytest.mark.parametrize("peer", PEERS)
def test_beside(peer, order):
    module = PEERS[peer][0]
    if not is_there(module):
        pytest.skip(f'{module} is not installed: pip install "art-patch[test]"')
    told = run(peer, order)
    if "broken" in told:
        pytest.skip(f"{module} cannot be imported: {told['broken']}")
    alone = told["alone"]
    assert not any("raised" in kind for kinds in alone.values() for kind in kinds)
    assert told["record"] == told["route"] == alone
    assert len(set(told["spans"].values())) == 1
    assert told["spans"]["alone"] != 0, "the peer did not work"
    assert told["calls"] == {"record": len(alone), "route": len(alone)}
    assert told["after_unpatch"] == 0
    assert (told["faults"], told["logged"], told["warned"]) == ({}, [], [])
    if order == "peer_first":
        assert told["changed"] == []
