"""An update made again over PostgreSQL; and from a manifest that somebody has edited: a reason, no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch.pipeline import Reproduction, reproduce
from art_patch.policies import MANIFEST
from art_patch.rewards import Judge
from art_patch.serving import EmbeddedEngine
from tests.support.cycles import TRAINING, Place, rewarded_traffic
from tests.support.engines import serve
from tests.support.postgres import Server, new_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = new_server()
    yield started
    started.end()


def again(place: Place) -> Reproduction:
    return reproduce(place.store, place.adapters, "agent@1", progress=lambda done, total, note: None)


def learn(place: Place, judge: Judge, **train: Any) -> None:
    rewarded_traffic(place)
    report = place.cycle(judge, replace(TRAINING, train=replace(TRAINING.train, epochs=1, **train)))
    assert report.candidate == "agent@1", report


def test_over_postgresql_an_update_made_again_gives_the_same_weights(
    tmp_path: Path, base: Path, judge: Judge, server: Server
):
    engine = EmbeddedEngine.from_pretrained(base, adapters_root=tmp_path / "adapters")
    with serve(engine) as running:
        place = Place(tmp_path, base, running.client, server.url(server.new_database()))
        learn(place, judge, anchor_weight=0.5)
        found = again(place)
        assert (found.equal, found.why_not, found.groups > 1, found.weights > 1000) == (True, {}, True, True)
        run = place.store.read.groups_of(place.store.read.group_ids(state="trained"))[0].trajectories[0]
        place.store.rights.erase(trajectory=run.id)
        found = again(place)
        assert (found.equal, list(found.why_not), len(found.runs_missing["erased"])) == (None, ["erased"], 1)
        assert place.store.verify() == []
        place.store.close()


Change = Callable[[dict[str, Any]], Any]


def update(**fields: Any) -> Change:
    return lambda m: m | {"data": m["data"] | {"update": m["data"]["update"] | fields}}


def group(**fields: Any) -> Change:
    def change(m: dict[str, Any]) -> Any:
        groups = m["data"]["update"]["groups"]
        return update(groups=[groups[0] | fields, *groups[1:]])(m)

    return change


def whole(**fields: Any) -> Change:
    return lambda m: m | fields


ATTACKS: dict[str, Change] = {
    "data is a list": whole(data=[1]),
    "update is a list": lambda m: m | {"data": {"update": [1]}},
    "no parts": lambda m: m | {"data": {"update": {"groups": []}}},
    "groups is a number": update(groups=7),
    "groups of numbers": update(groups=[7]),
    "siblings of numbers": group(siblings=[7]),
    "siblings too short": group(siblings=[["a"]]),
    "siblings of wrong types": group(siblings=[[[1], {}, "x", "y"]]),
    "advantage a text": group(siblings=[["a", None, "x", True]]),
    "kind acts": group(kind={"a": "\x1b[2J"}),
    "group is a list": group(group=[1]),
    "made with a list": whole(made_with=[1]),
    "made with nothing": whole(made_with=None),
    "threads a text": lambda m: m | {"made_with": m["made_with"] | {"threads": "x"}},
    "threads negative": lambda m: m | {"made_with": m["made_with"] | {"threads": -1}},
    "threads without end": lambda m: m | {"made_with": m["made_with"] | {"threads": 10**9}},
    "no threads": lambda m: m | {"made_with": {k: v for k, v in m["made_with"].items() if k != "threads"}},
    "parent climbs": whole(parent="../../../etc@1"),
    "parent a number": whole(parent=3),
    "parent without a step": whole(parent="agent"),
    "no parent": lambda m: {k: v for k, v in m.items() if k != "parent"},
    "champion climbs": whole(champion="../../../etc@1"),
    "no champion": lambda m: {k: v for k, v in m.items() if k != "champion"},
    "no art_patch": lambda m: {k: v for k, v in m.items() if k != "art_patch"},
    "config a list": whole(config=[1]),
    "config nothing": whole(config=None),
    "config's loss a text": lambda m: m | {"config": m["config"] | {"loss": "x"}},
    "config of wrong types": lambda m: m | {"config": m["config"] | {"lora_rank": "x"}},
    "processes without end": lambda m: m | {"config": m["config"] | {"processes": 10**6}},
    "epochs a text": lambda m: m | {"config": m["config"] | {"epochs": "x"}},
    "max_tokens a text": lambda m: m | {"config": m["config"] | {"max_tokens": "x"}},
    "no device": lambda m: m | {"made_with": {}},
}


def test_a_manifest_that_is_none_is_a_reason(place: Place, judge: Judge):
    learn(place, judge)
    path = place.adapters / "agent@1" / MANIFEST
    own = path.read_text()
    broke: list[str] = []
    for name, change in ATTACKS.items():
        path.write_text(json.dumps(change(json.loads(own))))
        try:
            found = again(place)
            if found.equal is not None or not found.why_not:
                broke.append(f"{name}: {found}")
        except Exception as error:  # each of them is a mistake
            broke.append(f"{name}: {error!r}")
    path.write_text(own)
    assert not broke, "\n".join(broke)
