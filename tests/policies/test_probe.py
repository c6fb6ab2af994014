"""A policy that is not applied, or applied wrongly, is told from one that computes a little differently."""

from __future__ import annotations

import pytest

from art_patch.errors import AdapterRejected
from art_patch.policies import Probe, check_probe

TUNED, BASE = (-1.0, -2.0, -0.5), (-1.4, -1.2, -0.9)
PROBE = Probe((5, 6, 7, 8), TUNED, BASE, "float32")


def off_by(nats: float) -> list[float]:
    return [value + nats for value in TUNED]


@pytest.mark.parametrize(("dtype", "nats"), [("float32", 5e-5), ("bfloat16", 0.04), ("float16", 0.01)])
def test_what_precision_explains_passes(dtype: str, nats: float) -> None:
    assert check_probe("agent@1", PROBE, off_by(nats), BASE, dtype=dtype) == pytest.approx(nats)


@pytest.mark.parametrize(("dtype", "nats"), [("float32", 2e-4), ("bfloat16", 0.1), ("float16", 0.03)])
def test_a_shift_of_all_tokens_does_not(dtype: str, nats: float) -> None:
    with pytest.raises(AdapterRejected, match="nats from the trainer's"):
        check_probe("agent@1", PROBE, off_by(nats), BASE, dtype=dtype)


def test_one_token_far_off_does_not() -> None:
    with pytest.raises(AdapterRejected, match="nats from the trainer's"):
        check_probe("agent@1", Probe(tuple(range(101)), (-1.0,) * 100, (-3.0,) * 100, "float32"),
                     [-1.0] * 99 + [-1.002], None, dtype="float32")  # fmt: skip


def test_a_lora_that_is_not_applied_is_named_as_such() -> None:
    with pytest.raises(AdapterRejected, match="answers as the base model does"):
        check_probe("agent@1", PROBE, list(BASE), list(BASE), dtype="float32")


def test_the_coarser_side_counts() -> None:
    coarse = Probe(PROBE.token_ids, TUNED, BASE, "bfloat16")
    assert check_probe("agent@1", coarse, off_by(0.04), BASE, dtype="float32") == pytest.approx(0.04)


@pytest.mark.parametrize("served", [[-1.0, -2.0], [-1.0, float("nan"), -0.5], [-1.0, float("-inf"), -0.5]])
def test_what_is_not_finite_or_not_there_is_refused(served: list[float]) -> None:
    with pytest.raises(AdapterRejected, match="not finite"):
        check_probe("agent@1", PROBE, served, BASE, dtype="bfloat16")
