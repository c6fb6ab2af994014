"""Arguments that no store takes, and answers that no JSON parser does: one clear line, and no traceback."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from art_patch.store import open_store
from art_patch.types import Policy
from tests.support.command_line import art_patch, says
from tests.support.run_samples import fill

NO_TEXT = os.fsdecode(b"\xffa")  # as Python keeps it in `sys.argv`


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with closing(open_store(f"sqlite:///{tmp_path}/default/store.db")) as store:
        store.ledger.add_base("agent@0", "tiny", "0" * 64, who="test")
        fill(store)
        gate = {"candidate": 0.5, "champion": 0.5, "lower_bound": float("-inf")}
        policy = Policy("agent@9", "tiny", "0" * 64, "candidate", 1.0, None, "agent@0", {"gate": gate})
        store.ledger.add_candidate(policy, trained_on=[], who="test")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("trajectories", "list", "--user", NO_TEXT), ("trajectories", "list", "--error", NO_TEXT),
        ("trajectories", "show", NO_TEXT), ("trajectories", "show", "--session", NO_TEXT), ("groups", "show", NO_TEXT),
        ("erase", "--user", NO_TEXT, "--dry-run"), ("reproduce", NO_TEXT), ("rollback", "--to", NO_TEXT),
    ],
)  # fmt: skip
def test_an_argument_that_is_no_text_is_refused(home: Path, command: tuple[str, ...]):
    says(art_patch(*command, home=home), 2, "is not text in UTF-8")
    done = art_patch(*command, "--json", home=home)
    assert json.loads(done.stdout)["exit_code"] == 2


def test_an_answer_is_json_whatever_numbers_are_on_record(home: Path):
    for command in (("policies", "show", "agent@9"), ("policies",)):
        done = art_patch(*command, "--json", home=home)
        assert "lower_bound" in done.stdout
        json.loads(done.stdout, parse_constant=int)
