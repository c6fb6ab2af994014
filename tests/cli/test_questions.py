"""Each of the twelve questions of an operator has a command on the page of questions, and all of them answer."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from art_patch.store import open_store
from tests.support.command_line import art_patch
from tests.support.crossing import fill
from tests.support.docs_pages import ROOT

PAGE = (ROOT / "docs/pages/how-to/questions.md").read_text()
ASKED = re.findall(r"\*\*(.+?\?)\*\*.*?```bash\n(.+?)\n```", PAGE, re.DOTALL)
OURS = {"agent@2": "agent@1", "01a20403bcae": "own-run-group", "s-77": "mine"}
"""What the page names, and what the store of this test has instead."""


def test_all_are_asked():
    assert len(ASKED) >= 12


@pytest.mark.parametrize(("question", "command"), ASKED)
def test_a_command_answers(question: str, command: str, tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db", project="default")
    fill(store, "own", "mine")
    store.ledger.set_engine(None, who="test")  # none runs
    store.close()
    words = [OURS.get(word, word) for word in shlex.split(command, comments=True)[1:]]
    page = art_patch(*words, home=tmp_path)
    # A policy that was only noted down cannot be made again, which is an answer, too.
    assert page.returncode in ((0, 20) if "reproduce" in words else (0,)), (question, page.stderr)
    whole = page if "--json" in words else art_patch(*words, "--json", home=tmp_path)
    assert json.loads(whole.stdout), question
