"""What a project may begin with, on the real vLLM: a fork, adopted LoRAs, and files that pass the gate."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from art_patch.rewards import Judge
from tests.benchmarks.families_start import begun_with, gap, on_vllm
from tests.support.cycles import TRAINING, Place, rewarded_traffic
from tests.support.engines import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_what_is_served_is_what_was_trained_and_the_file_passes_the_gate(tmp_path: Path, judge: Judge):
    vllm_python()
    base, policies = begun_with(tmp_path)
    *_, trained = policies
    adapters = tmp_path / "other" / "adapters"
    with on_vllm(tmp_path, base, [name for name in policies if name != trained]) as client:
        place = Place(tmp_path / "other", base, client)
        with closing(place.store):
            rewarded_traffic(place)
            # The cycle loads what the file has made into the running vLLM, which proves its probe.
            tested = place.cycle(judge, replace(TRAINING, gate=replace(TRAINING.gate, margin=-1.0)))
            assert (tested.outcome, tested.candidate, place.champion) == ("promoted", trained, trained)
            assert {name: gap(client, base, name, adapters / name) for name in policies} == pytest.approx(
                dict.fromkeys(policies, 0.0), abs=1e-3
            )
            assert place.store.verify() == []
