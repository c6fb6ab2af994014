"""`art-patch train FILE`: a candidate from training files, which passes the gate of the next cycle as any other."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch.errors import ConfigError, MalformedFile, TrainingError, TransitionError
from art_patch.pipeline import train_on_files
from art_patch.pipeline.cycle_run import CycleConfig
from art_patch.policies import MANIFEST
from art_patch.rewards import Judge
from art_patch.training import read_job
from art_patch.training.data import supervised
from art_patch.types import KnownScenario
from tests.support.cycles import TRAINING, Place, rewarded_traffic

USER = {"role": "user", "content": "how many plums?"}
FOUR = {"role": "assistant", "content": "four"}
FIVE = {"role": "assistant", "content": "five"}

OPENAI = {"messages": [USER, FOUR]}
TRL = {"prompt": [USER], "completion": [FOUR]}
SHAREGPT = {"conversations": [{"from": "human", "value": "how many plums?"}, {"from": "gpt", "value": "four"}]}
OPENAI_PAIR = {"input": {"messages": [USER]}, "preferred_output": [FOUR], "non_preferred_output": [FIVE]}
TRL_PAIR = {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}
SHAREGPT_PAIR = {
    "conversations": SHAREGPT["conversations"][:1],
    "chosen": {"from": "gpt", "value": "four"},
    "rejected": {"from": "gpt", "value": "five"},
}

ONE_STEP = CycleConfig(train=replace(TRAINING.train, start="champion", epochs=1, minibatches=1), gate=TRAINING.gate)


def written(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def train(place: Place, *files: str, config: CycleConfig = ONE_STEP) -> Any:
    return train_on_files(
        place.store, place.adapters, config, files, who="test",
        progress=lambda stage, done, total, note="": place.stages.append(stage), now=100.0,
    )  # fmt: skip


def jobs(place: Place, directory: Path, lines: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The update that these lines give, as a killed command leaves it."""

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    file = written(directory / "lines.jsonl", *lines)
    with monkeypatch.context() as patched:
        from art_patch.training.loop import update

        patched.setattr(update, "load", killed)
        with pytest.raises(KeyboardInterrupt):
            train(place, file)
    (begun,) = (place.adapters.parent / "training").glob("*@*")
    return read_job(begun)


def test_each_format_says_the_same(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown = [jobs(place, tmp_path, [line], monkeypatch) for line in (OPENAI, TRL, SHAREGPT)]
    assert shown[0].demonstrations == shown[1].demonstrations == shown[2].demonstrations != ()
    told = [jobs(place, tmp_path, [line], monkeypatch) for line in (OPENAI_PAIR, TRL_PAIR, SHAREGPT_PAIR)]
    assert told[0].pairs == told[1].pairs == told[2].pairs
    (pair,) = told[0].pairs
    assert (pair.chosen, pair.source) == (shown[0].demonstrations[0], "file")
    # A line counts as often as it is there; an answer of weight 0 is read and not learned.
    light = {"messages": [USER, {**FIVE, "weight": 0}, USER, FOUR]}
    job = jobs(place, tmp_path, [OPENAI, OPENAI, light], monkeypatch)
    assert job.demonstrations[0] == job.demonstrations[1] == shown[0].demonstrations[0]
    assert sum(job.demonstrations[2].sampled_T) == sum(job.demonstrations[0].sampled_T)


def test_a_candidate_waits_for_scenarios_and_passes_the_gate_as_any_other(place: Place, judge: Judge, tmp_path: Path):
    done = train(place, written(tmp_path / "chat.jsonl", OPENAI), written(tmp_path / "pairs.jsonl", TRL_PAIR))
    assert (done.policy.name, done.policy.state, done.start) == ("agent@1", "candidate", "agent@0")
    assert (done.demonstrations, done.pairs, done.metrics["steps"]) == (1, 1, 2)
    assert done.untestable == "0 held-out scenarios, 3 are needed to test a candidate"
    assert place.store.ledger.history(policy="agent@1")[0]["reason"] == "trained on chat.jsonl, pairs.jsonl"
    manifest = json.loads((place.adapters / "agent@1" / MANIFEST).read_text())
    assert (manifest["parent"], len(manifest["data"]["files"]), manifest["judges"]) == ("agent@0", 2, [])
    # There is no traffic yet: it is neither tested nor rejected.
    waits = place.cycle(judge, TRAINING)
    assert (waits.outcome, waits.candidate) == ("nothing to do", "agent@1")
    assert "agent@1, trained on files, waits: 0 held-out scenarios, 3 are needed" in waits.reason
    rewarded_traffic(place)
    tested = place.cycle(judge, replace(TRAINING, gate=replace(TRAINING.gate, margin=-1.0)))
    assert (tested.outcome, tested.candidate, "gate" in tested.metrics) == ("promoted", "agent@1", True)
    assert place.champion == "agent@1"
    # The next file goes on from there.
    assert train(place, written(tmp_path / "more.jsonl", SHAREGPT)).start == "agent@1"
    anew = replace(ONE_STEP, train=replace(ONE_STEP.train, start="base", lora_rank=2))
    begun = train(place, written(tmp_path / "anew.jsonl", SHAREGPT), config=anew)
    assert (begun.start, begun.policy.parent) == ("agent@0", "agent@1")
    config = json.loads((place.adapters / begun.policy.name / "adapter_config.json").read_text())
    assert config["r"] == 2


def test_a_held_out_scenario_teaches_nothing(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def known(_: Any, keys: set[str]) -> dict[str, KnownScenario]:
        return {key: KnownScenario(key, True, 1.0) for key in keys if "plums" in key or len(keys) == 1}

    monkeypatch.setattr(type(place.store.read), "known_scenarios", known)
    with pytest.raises(ConfigError, match=r"nothing to learn .*1 lines, first a.jsonl, line 1: held out for the gate"):
        train(place, written(tmp_path / "a.jsonl", OPENAI))
    assert place.states() == {"agent@0": "champion"}


def test_what_cannot_be_learned_is_counted_with_its_first_place(place: Place, tmp_path: Path):
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, FOUR]}
    alike = {"prompt": [USER], "chosen": [FOUR], "rejected": [FOUR]}
    silent = {"messages": [USER, {**FOUR, "weight": 0}]}
    done = train(place, written(tmp_path / "a.jsonl", OPENAI, image, image, alike, silent))
    assert done.left_out == {
        "it holds an image, audio or file": (2, "a.jsonl, line 2"),
        "both answers are the same": (1, "a.jsonl, line 4"),
        "no answer": (1, "a.jsonl, line 5"),
    }
    assert done.metrics["left_out"]["no answer"] == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ({"text": "x"}, "line 2: no known format has the keys text"),
        ({"messages": [USER]}, "line 2: messages: the last message is the user's"),
        ({"prompt": [USER]}, "line 2: a line of format grpo has no answer that is known to be good"),
        ({"conversations": [{"from": "boss", "value": "x"}]}, "line 2: conversations[0].from must be one of"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "line 2: conversations[0].value must be a text"),
        ({**TRL_PAIR, "rejected": []}, "line 2: rejected must be a list of messages"),
        ({**OPENAI, "tools": "[" * 100_000}, "line 2: tools is a text that is no JSON"),
        ({"messages": [{"role": "x" * 10_000, "content": ""}]}, f"not '{'x' * 49}; nothing was trained"),
        (
            {f"k{n}": 1 for n in range(100_000)},
            "line 2: no known format has the keys k0, k1, k10, k100, k1000, k10000, k",
        ),
        ({"messages": [USER, FOUR] * 2_049}, "line 2: messages has more than 4,096 messages"),
    ],
)
def test_a_wrong_line_is_one_error_and_nothing_is_trained(place: Place, tmp_path: Path, line: Any, words: str):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(OPENAI) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(MalformedFile) as raised:
        train(place, str(file))
    assert words in str(raised.value)
    assert str(file) in str(raised.value)
    assert place.stages == []


def test_half_a_character_is_counted_and_compared_as_the_store_writes_it(place: Place, tmp_path: Path):
    half = {"messages": [USER, {"role": "assistant", "content": "\ud800"}]}
    done = train(place, written(tmp_path / "a.jsonl", {**OPENAI, "scenario_key": "\ud800\0"}, half))
    assert done.left_out == {"it holds half of a surrogate pair, which is no character": (1, "a.jsonl, line 2")}
    place.store.transfers.add_groups(
        {"x": {"id": "\ud800", "scenario_key": "\udfff", "how": "imported", "held_out": False, "state": "formed"}
         | {"created_at": 1.0}},
    )  # fmt: skip


def test_of_a_long_conversation_only_what_fits_is_rendered(place: Place, tmp_path: Path):
    """Each answer has all messages before it: rendering all 2,000 would take minutes."""
    config = replace(ONE_STEP, train=replace(ONE_STEP.train, max_tokens=64))
    done = train(place, written(tmp_path / "a.jsonl", {"messages": [USER, FOUR] * 2_000}), config=config)
    assert (done.demonstrations, done.left_out) == (1, {})


def test_what_is_no_file_is_told_and_a_file_that_changes_meanwhile_trains_nothing(place: Place, tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for odd in ("/dev/zero", "/proc/self/mem", *map(str, (tmp_path, tmp_path / "fifo", tmp_path / "link"))):
        with pytest.raises(ConfigError, match=rf"{odd} (is no file; name one|cannot be read: )"):
            train(place, odd)
    file, other = written(tmp_path / "a.jsonl", OPENAI), Path(written(tmp_path / "b.jsonl", TRL_PAIR))

    def swap(stage: str, done: int, total: int, note: str = "") -> None:
        other.replace(file) if stage == "read" and other.exists() else None

    with pytest.raises(MalformedFile, match="a file was changed while it was read"):
        train_on_files(place.store, place.adapters, ONE_STEP, [file], who="test", progress=swap, now=100.0)
    assert place.states() == {"agent@0": "champion"}
    # Two files of one name are both on record.
    (tmp_path / "more").mkdir()
    train(place, written(tmp_path / "a.jsonl", OPENAI), written(tmp_path / "more/a.jsonl", TRL_PAIR))
    manifest = json.loads((place.adapters / "agent@1" / MANIFEST).read_text())
    assert len(manifest["data"]["files"]) == 2
    odd = train(place, written(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")), SHAREGPT)).policy
    assert place.store.ledger.history(policy=odd.name)[0]["reason"] == r"trained on \udcff.jsonl"


def test_more_than_an_update_can_hold_is_told(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervised, "MOST_TOKENS", 30)
    with pytest.raises(ConfigError, match=r"the lines before a.jsonl, line \d have more than 30 tokens"):
        train(place, written(tmp_path / "a.jsonl", *[OPENAI] * 9))


def test_the_tools_of_sharegpt_are_calls_with_ids(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tool = {"name": "lookup", "description": "d", "parameters": {"type": "object", "properties": {}}}
    sharegpt = {
        "system": "you are a shop",
        "tools": json.dumps([tool]),
        "conversations": [
            {"from": "human", "value": "plums?"},
            {"from": "function_call", "value": json.dumps({"name": "lookup", "arguments": {"item": "plum"}})},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "four"},
        ],
    }
    called = {"id": "call_2", "type": "function", "function": {"name": "lookup", "arguments": '{"item": "plum"}'}}
    openai = {
        "tools": [{"type": "function", "function": tool}],
        "messages": [
            {"role": "system", "content": "you are a shop"},
            {"role": "user", "content": "plums?"},
            {"role": "assistant", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "call_2", "content": "4"},
            FOUR,
        ],
    }
    theirs, ours = (jobs(place, tmp_path, [line], monkeypatch).demonstrations for line in (sharegpt, openai))
    assert theirs == ours != ()


def test_a_killed_command_goes_on_with_its_own_update_alone(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = jobs(place, tmp_path, [OPENAI], monkeypatch)
    done = train(place, str(tmp_path / "lines.jsonl"))
    assert (done.policy.name, done.metrics["job"]) == (job.target.name, job.fingerprint[:16])
    jobs(place, tmp_path, [TRL_PAIR], monkeypatch)
    assert train(place, written(tmp_path / "other.jsonl", OPENAI)).demonstrations == 1
    assert not list((place.adapters.parent / "training").glob("*@*"))


def test_nothing_is_trained_while_a_policy_is_tested_or_where_the_update_breaks(place: Place, tmp_path: Path):
    file = written(tmp_path / "a.jsonl", OPENAI)
    name = train(place, file).policy.name
    broken = replace(ONE_STEP, train=replace(ONE_STEP.train, learning_rate=1e30, epochs=3))
    with pytest.raises(TrainingError, match="nothing published"):
        train(place, file, config=broken)
    place.store.ledger.move(name, "canary", who="test", reason="test", percent=5.0)
    with pytest.raises(TransitionError, match=f"{name} is being tested"):
        train(place, file)
