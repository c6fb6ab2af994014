"""A suite that cannot be asked is refused before anything else happens."""

from __future__ import annotations

from pathlib import Path

from tests.support.command_line import art_patch, says


def test_retrain_refuses_a_suite_that_is_none(tmp_path: Path):
    suite = tmp_path / "suite.jsonl"
    says(art_patch("retrain", "--suite", suite, home=tmp_path), 2, "suite", "cannot be read")
    suite.write_text('{"prompt": "hi"}')
    says(art_patch("retrain", home=tmp_path, ART_PATCH_SUITE=str(suite)), 2, "line 1", "'prompt'")
