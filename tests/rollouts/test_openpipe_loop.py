"""A loop in OpenPipe ART's present form on a real engine and trainer, and what scripts get wrong in it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import art_patch as art
from art_patch.rollouts import history
from art_patch.rollouts.handed_over import handed_over
from art_patch.store import open_store

USER: Any = {"role": "user", "content": "hi"}


async def refuses(model: Any, backend: Any, group: art.TrajectoryGroup) -> None:
    """Try what scripts get wrong; each is told before anything is stored."""
    run, nothing = group.trajectories[0], art.TrajectoryGroup([ValueError("boom")])
    changed = [run.model_copy(update=update) for update in (
        {"reward": None}, {"reward": "x"}, {"reward": float("inf")}, {"metrics": {"a": None}})]  # fmt: skip
    wrong: list[tuple[Any, str]] = [
        *((model.log([art.TrajectoryGroup([run, each])]), "a reward|the metric a is None") for each in changed[1:]),
        *((model.train([art.TrajectoryGroup([run, each])]), "a reward|the metric a is None") for each in changed[:2]),
        (model.log(metrics={"a": "x"}), "the metric a is 'x', and must be a number"),
        (model.log(metrics={"a": 1.0}, step="3"), "step='3' must be a whole number"),
        (model.log([group], split=None), "split=None must be a name"),
        (model.log([None]), "a NoneType is neither a Trajectory"),
        (model.train([nothing]), "no rollout to learn from: 1 raised, the first ValueError: boom"),
        (model.train([]), "there is no rollout to learn from"),
        (model.train_sft([ValueError("boom")]), "ValueError of a rollout cannot be imitated"),
        (model.train_sft([run], {"learning_rate": 1}), r"neither an art\.TrainSFTConfig"),
    ]
    for call, words in wrong:
        with pytest.raises(art.ConfigError, match=words):
            await call
    other = art.TrainableModel(
        name="counter",
        project="forms",
        base_model=model.base_model,
        _internal_config={"engine_args": {"max_model_len": 9}},
    )
    with pytest.raises(art.ConfigError, match="registered already, and its engine was started with"):
        await other.register(backend)
    kept, model._internal_config = model._internal_config, {"engine_args": {"max_model_len": 9}}
    with pytest.raises(art.ConfigError, match="set _internal_config and inference_engine before"):
        await model.train([group])
    model._internal_config = kept


def test_conversations_that_a_killed_script_left_are_deleted_and_those_of_another_stay(tmp_path: Path):
    left, own = tmp_path / ".train-sft-x.jsonl", tmp_path / "sft-of-mine.jsonl"
    for path in (left, own):
        path.write_text("secret")
    with handed_over(tmp_path, ["a"]) as first:
        with handed_over(tmp_path, ["b", "c"]) as second:
            assert (first.read_text(), second.read_text(), second.stat().st_mode & 0o777) == ("a\n", "b\nc\n", 0o600)
        assert {*tmp_path.iterdir()} == {own, first}
    assert [*tmp_path.iterdir()] == [own]


def test_a_damaged_state_is_told_and_kept(tmp_path: Path):
    history.write_state(tmp_path, {"a": 1})
    for wrong in (None, [1], {"a": object()}):
        with pytest.raises(art.ConfigError, match="a state is a dictionary of JSON values"):
            history.write_state(tmp_path, wrong)  # type: ignore[arg-type]
    assert history.read_state(tmp_path) == {"a": 1}
    assert history.read_state(tmp_path, "other/model") is None
    for text in (b"{bad", b"[1]", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "state.json").write_bytes(text)
        with pytest.raises(art.ConfigError, match="mend it, or delete it to begin anew"):
            history.merge_state(tmp_path, {"b": 2})
        assert (tmp_path / "state.json").read_bytes() == text


def test_the_history_holds_finite_numbers_alone(tmp_path: Path):
    runs = [art.TrajectoryGroup([art.Trajectory(reward=1.0)], metrics={"odd": float("nan"), "solved": True})]
    history.note(tmp_path, step=1, split="val", metrics={"x": float("nan"), **history.metrics_of(runs)}, at=1.0)
    line = json.loads((tmp_path / "history.jsonl").read_text())
    assert line == {"step": 1, "at": 1.0, "val/reward": 1.0, "val/group_solved": 1.0, "val/exception_rate": 0.0}


def test_a_loop_in_the_present_form_trains_and_stores_each_rollout_once(base: Path, tmp_path: Path):
    model = art.TrainableModel(
        name="counter", project="forms", base_model=str(base),
        config=art.TrainConfig(minibatches=1, epochs=1, max_kl_nats=None, max_clip_fraction=None),
        _internal_config=art.dev.InternalModelConfig(engine_args={"max_model_len": 64}, peft_args={"r": 4}),
    )  # fmt: skip

    async def rollout(word: str, reward: float) -> art.Trajectory:
        run = art.Trajectory(messages=[{"role": "user", "content": word}], reward=reward)  # type: ignore[call-arg]
        answer = await model.create_completion(run, max_tokens=3)
        assert answer.content == run.messages()[-1]["content"]  # type: ignore[typeddict-item]
        assert answer.tool_calls is None
        return run

    async def loop() -> None:
        async with art.LocalBackend(path=tmp_path, engine="embedded", threads=1) as backend:
            await model.register(backend)
            assert await model.get_step() == 0
            asked = await model.create_completion([USER], max_tokens=2)
            assert asked.choices[0].message.content == asked.content
            groups = await art.gather_trajectory_groups(
                (art.TrajectoryGroup((rollout(word, reward) for reward in (0.0, 1.0)), metrics={"solved": 0.5})
                 for word in ("one", "two")),
                pbar_desc=None,
            )  # fmt: skip
            await model.log(groups, split="train")
            result = await backend.train(model, groups, learning_rate=1e-2, loss_fn="ppo")
            await model.log(groups, split="train", metrics=result.metrics, step=7)
            assert (result.step, result.reason, await model.get_step()) == (1, "", 1)
            assert (result.checkpoint_path or "").endswith("counter@1")
            prompted = art.Model(name="openai/some", project="forms")
            await prompted.register(backend)
            await prompted.log(metrics={"reward": 9.0}, split="val")  # its own, and not the trained model's
            prompted.overwrite_state({"its": "own"})
            assert model.read_state() is None
            await refuses(model, backend, groups[0])
            await model.log(groups[:1], split="val")  # of another split, so these are other records
            model.overwrite_state({"at": {"epoch": 1}})
            assert model.merge_state({"at": {"item": 2}}) == {"at": {"epoch": 1, "item": 2}} == model.read_state()
            alone = await model.train([run for group in groups for run in group], learning_rate=1e-2)
            assert (alone.step, alone.reason) == (2, "")
            # Demonstrations, in place of rewards.
            told: Any = {"role": "assistant", "content": "yes"}
            # What comes after the last answer cannot be imitated.
            taught = await model.train_sft(art.Trajectory(messages_and_choices=[USER, told, USER]))  # type: ignore[arg-type]
            assert (taught.step, taught.reason) == (3, "")
            file = tmp_path / "chats.jsonl"
            file.write_text(json.dumps({"messages": [USER, told]}) + "\n")
            again = await art.train_sft_from_file(model, file, epochs=2, peak_lr=1e-3)
            assert again.step == 4
            assert await model.history("val/reward") == [(1, 0.5)]
            with pytest.raises(art.ConfigError, match="trajectory 1 has a conversation without an answer"):
                await model.train_sft([art.Trajectory(messages_and_choices=[USER])])
            silent: Any = {**told, "content": ""}
            with pytest.raises(art.ArtPatchError, match=r"^conversation 1: messages.1.: the assistant says nothing"):
                await model.train_sft([art.Trajectory(messages_and_choices=[USER, silent])])
            for wrong, words in ({"epoch": 0}, "takes no epoch"), ({"warmup_ratio": 5}, "must be from 0 to 1"):
                with pytest.raises(art.ConfigError, match=words):
                    await art.train_sft_from_file(model, file, **wrong)  # type: ignore[arg-type]
            with pytest.raises(art.ConfigError, match="there is no trajectory"):
                await model.train_sft([])
            with pytest.raises(art.ConfigError, match="has 2 values"):
                await model.train_sft(
                    [art.Trajectory(messages_and_choices=[USER, told])], art.TrainSFTConfig([1e-3, 0])
                )
            await backend.close()  # a second time, and awaited

    asyncio.run(loop())
    store = open_store(f"sqlite:///{tmp_path}/forms/store.db")
    trained, spent = store.read.groups(state="trained"), store.read.groups(state="spent")
    # Two groups of the first update; two of the second, in which they were formed anew; and one that was evaluated.
    assert [(len(trained), len(spent)), [group.held_out for group in spent]] == [(4, 1), [True]]
    policy = store.ledger.policy("counter@1")
    assert policy is not None
    assert policy.metrics["train"]["kl_nats"] >= 0
    store.close()
    config = json.loads((tmp_path / "forms/adapters/counter@4/adapter_config.json").read_text())
    assert config["r"] == 4
    lines = [json.loads(line) for line in (tmp_path / "forms/history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 0, 7, 0, 1, 1, 2, 3]
    assert lines[0]["train/group_solved"] == 0.5
