"""The demo and its agent, over pipes that hold 64 KiB."""

from __future__ import annotations

from pathlib import Path

import pytest

from art_patch.demo.processes import Agent, Program

SAYS_MUCH = """
import json, sys
for line in sys.stdin:
    task = json.loads(line)
    print(json.dumps({"id": task["id"], "messages": [task["question"]] * 2}), flush=True)
"""


@pytest.mark.timeout(30)
def test_an_agent_that_reads_no_further_until_its_answers_are_read_hangs_nobody(tmp_path: Path):
    """As those on an event loop do: they answer and read in turns."""
    questions = [str(number) * 2_000 for number in range(100)]
    with Agent(Program(SAYS_MUCH), tmp_path / "agent.py", {}, tmp_path / "agent.log") as agent:
        answers = agent.ask({"question": question} for question in questions)
    assert [answer["messages"] for answer in answers] == [[question] * 2 for question in questions]


ENDS_IN_ORDER = """
import atexit, pathlib, sys, time
atexit.register(lambda: (time.sleep(0.3), pathlib.Path(sys.argv[0]).with_name("ended").touch()))
for line in sys.stdin:
    pass
"""


def test_an_agent_ends_by_itself_so_that_its_last_calls_are_recorded(tmp_path: Path):
    with Agent(Program(ENDS_IN_ORDER), tmp_path / "agent.py", {}, tmp_path / "agent.log"):
        pass
    assert (tmp_path / "ended").exists()
