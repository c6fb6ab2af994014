"""One ordinary assistant a framework, with the one line and without: it says the same, and is recorded or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from art_patch.demo.processes import unpatched
from tests.frameworks.shops import SHOPS, answer_all, program
from tests.support.recorded import store_url, trajectories
from tests.support.replies import TEXT, reply
from tests.support.servers import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", SHOPS)
def test_it_says_the_same_with_us_and_without(tmp_path: Path, name: str):
    given, url = program(name), store_url(tmp_path)
    with serving() as server:
        server.answer = reply
        variables = {"OPENAI_BASE_URL": server.url, "OPENAI_API_BASE": server.url, "ART_PATCH_STORE": url}
        without = answer_all(unpatched(given), tmp_path, variables, size=3)
        assert not (tmp_path / "store.db").exists()
        asked = len(server.seen)
        patched = answer_all(given, tmp_path, variables, size=3)
        assert len(server.seen) == 2 * asked == 12
    assert patched == without
    assert [one["messages"][-1]["content"] for one in patched] == [TEXT] * 3
    found = trajectories(url)
    assert sorted(len(each.calls) for each in found) == [2, 2, 2]
    questions = [one["messages"][0]["content"] for one in patched]
    assert sorted(each.calls[0].messages[-1]["content"] for each in found) == sorted(questions)
