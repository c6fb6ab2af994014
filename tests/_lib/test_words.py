"""What a terminal shows of texts: parts of a reason, a line each."""

from __future__ import annotations

import pytest

from art_patch._lib.words import sentences


@pytest.mark.parametrize(
    ("reason", "parts"),
    [
        ("rolled back by hand", ["rolled back by hand"]),
        ("", []),
        (
            "scores 0.5 against 0.6; not proven better: if both were equal; besides, it ruins some (a; b), more",
            ["scores 0.5 against 0.6", "not proven better: if both were equal", "besides, it ruins some (a; b), more"],
        ),
        (
            "gains: judge +0.1 (-0.2 to 0.4, 9\nscenarios); more",
            ["gains: judge +0.1 (-0.2 to 0.4, 9 scenarios)", "more"],
        ),
        # What a person typed: brackets that are never closed, or never opened; semicolons at the end.
        ("it (was; bad", ["it (was; bad"]),
        (":) fine; good;", [":) fine", "good;"]),
        ("\x1b[31mred; plain", ["\\x1b[31mred", "plain"]),
    ],
)
def test_a_reason_has_parts(reason: str, parts: list[str]):
    assert sentences(reason) == parts
