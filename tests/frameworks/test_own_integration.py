"""What integrations/README.md says: 40 lines are an integration."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from art_patch.context import identify
from art_patch.recording import Exchange, Recorder, set_recorder
from art_patch.settings import Settings
from art_patch.types import Call, Record, SpanInfo, TrajectoryInfo

ROOT = Path(__file__).parents[2]
(CODE,) = re.findall(r"```python\n(.*?)```", (ROOT / "integrations/README.md").read_text(), re.DOTALL)


class Sink:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, records: Any) -> None:
        self.records += records


@pytest.fixture
def recorder():
    sink = Sink()
    recorder = Recorder(Settings(flush_interval_s=0.005), open_sink=lambda: sink)
    set_recorder(recorder)
    yield recorder, sink
    set_recorder(None)
    assert recorder.stop(10)


def event(what: str, id: str, **known: Any) -> Any:
    return SimpleNamespace(what=what, id=id, **({"error": None, "output": None, "parent": None} | known))


def test_forty_lines(recorder):
    recording, sink = recorder
    assert len([line for line in CODE.splitlines() if line]) <= 40
    module = ModuleType("its_integration")
    exec(CODE, module.__dict__)
    framework = SimpleNamespace(listeners=[])
    module.arm(framework)
    module.arm(framework)
    (listener,) = framework.listeners

    listener.began(event("run", "r", name="shop", thread="t"))
    listener.began(event("tool", "a", run="r", name="look", input={"at": "sky"}))
    listener.began(event("model", "m", run="r", parent="a"))
    who = identify()
    Exchange(recording, "gpt-x", who.trajectory, who.span_id).finish("complete")
    listener.ended(event("model", "m"))
    listener.ended(event("tool", "a", output="blue"))
    listener.ended(event("run", "r", output="It is blue."))

    assert recording.flush(10)
    (call,) = [each for each in sink.records if isinstance(each, Call)]
    spans = {each.name: each for each in sink.records if isinstance(each, SpanInfo)}
    infos = [each for each in sink.records if isinstance(each, TrajectoryInfo)]
    assert {(each.id, each.name, each.session_id) for each in infos} == {("r", "shop", "t")}
    assert (call.trajectory_id, call.span_id) == ("r", spans["look"].id)
    assert spans["look"].attributes == {"input": {"at": "sky"}, "output": "blue"}
    assert spans["shop"].attributes == {"output": "It is blue."}
    assert identify().trajectory is None
