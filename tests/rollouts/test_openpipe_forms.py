"""Scripts for OpenPipe ART in its present form, and in older ones: what they write is obeyed here, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import art_patch as art
import art_patch.agent
import art_patch.backends
import art_patch.environment
import art_patch.trainer
import art_patch.utils
from art_patch.rollouts.forms import as_groups, internal_config, train_config

# `art.__all__` of OpenPipe ART 0.5.18, its newest release of 2026-11.
NAMES = [
    "dev", "auto_trajectory", "capture_auto_trajectory", "gather_trajectories", "gather_trajectory_groups",
    "trajectory_group_batches", "Backend", "LocalBackend", "LocalTrainResult", "ServerlessBackend",
    "ServerlessTrainResult", "Messages", "MessagesAndChoices", "Tools", "Model", "TrainableModel", "retry",
    "TrainSFTConfig", "TrainConfig", "TrainResult", "Trajectory", "TrajectoryGroup", "capture_yielded_trajectory",
    "yield_trajectory",
]  # fmt: skip
ABSENT = {"LocalTrainResult", "ServerlessBackend", "ServerlessTrainResult"}
USER: Any = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_here_or_says_what_takes_its_place(name: str):
    if name not in ABSENT:
        assert name in art.__all__
        return
    with pytest.raises(AttributeError, match=f"art_patch has no {name}; write art.") as told:
        getattr(art, name)
    assert hasattr(art, str(told.value).partition("write art.")[2].split(",")[0].split("(")[0])


def test_a_method_of_its_backend_that_cannot_exist_says_what_to_do_instead(tmp_path: Path):
    backend: Any = art.LocalBackend(path=tmp_path)
    with pytest.raises(
        AttributeError, match=r"no _experimental_push_to_s3: .*`art-patch policies export`; leave it out"
    ):
        backend._experimental_push_to_s3()
    with pytest.raises(AttributeError, match="has no attribute 'push'"):
        backend.push()


def test_modules_have_the_names_that_scripts_import_from_them():
    from art_patch.rewards import ruler, ruler_score_group
    from art_patch.rewards.ruler import ruler as the_same
    from art_patch.rewards.ruler import ruler_score_group as the_same_for_groups

    assert (ruler, ruler_score_group) == (the_same, the_same_for_groups)
    assert art_patch.utils.retry is art.retry
    assert art_patch.utils.limit_concurrency is art.limit_concurrency
    assert art_patch.backends.LocalBackend is art.LocalBackend
    assert art_patch.agent.Agent is art.Agent
    assert art_patch.environment.Environment is art.Environment
    assert art_patch.trainer.GRPOTrainer is art.GRPOTrainer


# --- settings ---


@pytest.mark.parametrize(
    ("given_", "ours"),
    [
        ({}, {}),
        ({"learning_rate": 1e-3, "epochs": 1}, {"learning_rate": 1e-3, "epochs": 1}),
        ({"loss_fn": "cispo"}, {"loss": art.LossConfig("cispo")}),
        ({"loss_fn": "cispo", "epsilon": 1.0, "epsilon_high": 3.0}, {"loss": art.LossConfig("cispo", ratio_cap=4.0)}),
        ({"loss_fn": "ppo"}, {"loss": art.LossConfig("dapo", clip_low=0.2, clip_high=0.2)}),
        ({"ppo": True, "epsilon_high": 0.3}, {"loss": art.LossConfig("dapo", clip_low=0.2, clip_high=0.3)}),
        ({"ppo": False}, {"loss": art.LossConfig("cispo")}),
        ({"epsilon": 0.1}, {"loss": art.LossConfig(clip_low=0.1, clip_high=0.1)}),
        ({"importance_sampling_level": "sequence"}, {"loss": art.LossConfig(level="sequence")}),
        ({"truncated_importance_sampling": 2.0}, {"loss": art.LossConfig(importance_cap=2.0)}),
        ({"max_negative_advantage_importance_sampling_weight": 4.0}, {"loss": art.LossConfig(clip_max=4.0)}),
        ({"kl_penalty_coef": 0.1}, {"loss": art.LossConfig(kl_coefficient=0.1)}),
        ({"loss_fn": "ppo", "beta": 0.1},
         {"loss": art.LossConfig("dapo", clip_low=0.2, clip_high=0.2, kl_coefficient=0.1)}),
        ({"normalize_advantages": False}, {"advantage_scale": "none"}),
        ({"scale_rewards": False}, {"advantage_scale": "none"}),
        ({"scale_rewards": True}, {"advantage_scale": "group"}),
        ({"packed_sequence_length": 4096, "precalculate_logprobs": True}, {"micro_batch_tokens": 4096}),
        ({"advantage_balance": 0.0, "plot_tensors": False, "adam_params": None, "save_checkpoint": True}, {}),
    ],
)  # fmt: skip
def test_a_setting_of_an_update_is_translated(given_: dict[str, Any], ours: dict[str, Any]):
    assert asdict(train_config(given_)) == asdict(art.TrainConfig(**ours))


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"advantage_balance": 0.5}, "good and bad trajectories weigh the same here; leave it out"),
        ({"loss_fn": "grpo"}, "write cispo or ppo"),
        ({"loss_fn": "cispo", "epsilon": 0.2}, "cispo bounds the ratio from above alone"),
        ({"importance_sampling_level": "average"}, "write token or sequence"),
        ({"kl_penalty_reference_step": 3}, "reference='champion'"),
        ({"save_checkpoint": False}, "delete_checkpoints"),
        ({"grad_accumulation_sequences": 8}, "batch_size, the number of groups"),
        ({"learning_rat": 1.0}, "train takes no learning_rat"),
        ({"allow_training_without_logprobs": True}, "openai_client"),
        ({"adam_params": object()}, "weight_decay"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must be"),
        ({"loss_fn": "cispo", "loss": art.LossConfig("gspo")}, "loss_fn and loss say the same"),
        ({"loss_fn": "cispo", "ppo": True}, "loss_fn and ppo say the same"),
        ({"kl_penalty_coef": 0.2, "beta": 0.1}, "kl_penalty_coef and beta say the same"),
        ({"scale_rewards": False, "advantage_scale": "group"}, "scale_rewards and advantage_scale say the same"),
        ({"normalize_advantages": 0}, "normalize_advantages=0 must be True or False"),
        ({"ppo": "yes"}, "ppo='yes' must be True or False"),
        ({"loss": "gspo"}, r"write, for example, loss=art.LossConfig\('gspo'\)"),
    ],
)
def test_a_setting_without_a_meaning_is_refused_and_not_ignored(given_: dict[str, Any], words: str):
    with pytest.raises(art.ConfigError, match=words):
        train_config(given_)


def test_a_config_of_another_kind_is_refused():
    for config in ({"learning_rate": 1.0}, art.TrainSFTConfig()):
        with pytest.raises(art.ConfigError, match=r"is no art\.TrainConfig"):
            internal_config().over(config)  # type: ignore[arg-type]


def test_settings_that_say_nothing_are_left_out():
    nothing: Any = {
        "engine_args": {"max_model_len": None}, "peft_args": {"r": None}, "tinker_args": None, "init_args": {},
        "trainer_args": {"max_steps": -1},
    }  # fmt: skip
    assert internal_config(nothing) == internal_config() == internal_config(None)


def test_settings_of_engine_and_trainer_are_translated(monkeypatch: pytest.MonkeyPatch):
    dev = art.dev
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = internal_config(
        dev.InternalModelConfig(
            engine_args=dev.EngineArgs(max_model_len=2048, gpu_memory_utilization=0.7, enable_lora=True),
            init_args=dev.InitArgs(max_seq_length=1024, load_in_4bit=True, load_in_8bit=False),
            peft_args=dev.PeftArgs(r=16, lora_alpha=32, bias="none"),
            trainer_args=dev.TrainerArgs(num_train_epochs=1.0, lr_scheduler_type="cosine", beta=0.01),
        ),
        dev.OpenAIServerConfig(server_args=dev.ServerArgs(tool_call_parser="hermes", enable_auto_tool_choice=True)),
    )
    assert found.serve == {"max_model_len": 1024, "gpu_memory_utilization": 0.7, "tool_parser": "hermes"}
    assert found.train == {
        "max_tokens": 1024, "base_bits": 4, "lora_rank": 16, "lora_alpha": 32, "epochs": 1, "lr_schedule": "cosine",
        "loss": art.LossConfig(kl_coefficient=0.01),
    }  # fmt: skip
    mine = art.TrainConfig(lora_rank=4)  # said in so many words, so it wins
    assert asdict(found.over(mine)) == asdict(art.TrainConfig(**found.train | {"lora_rank": 4}))


def test_a_setting_of_the_engines_speed_is_told_and_not_used(monkeypatch: pytest.MonkeyPatch):
    with pytest.warns(UserWarning, match="enforce_eager=True changes the speed or memory"):
        assert internal_config({"engine_args": {"enforce_eager": True}}) == internal_config()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.warns(UserWarning, match="gpu_memory_utilization=0.8 is not used: there is no GPU here"):
        assert internal_config({"init_args": {"gpu_memory_utilization": 0.8}}) == internal_config()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"trainer_gpu_ids": [0]}, "trainer_gpu_ids=.* has no meaning here"),
        ({"engine_args": {"quantization": "awq"}}, "engine_args: quantization='awq' has no meaning here"),
        ({"init_args": {"full_finetuning": True}}, "full_finetuning"),
        ({"peft_args": {"use_rslora": True}}, "use_rslora"),
        ({"peft_args": {"r": -1}}, "lora_rank=-1 must be"),
        ({"trainer_args": {"num_train_epochs": 1.5}}, "epochs=1.5 must be a whole number"),
        (
            {"trainer_args": {"seed": 1}, "peft_args": {"random_state": 2}},
            "random_state=2 sets seed, which is 1 already",
        ),
        ({"peft_args": [8]}, r"peft_args is \[8\], and must be a dictionary"),
    ],
)
def test_a_setting_of_engine_or_trainer_without_a_meaning_is_refused(config: dict[str, Any], words: str):
    model: Any = {"name": "a", "project": "b", "base_model": "c"}
    with pytest.raises(art.ConfigError, match=words):
        art.TrainableModel(**model, _internal_config=config)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"base_path": "elsewhere"}, r"base_path .*LocalBackend\(path=...\)"),
        ({"report_metrics": ["wandb"]}, "report_metrics .*art-patch send wandb"),
        ({"run_name": "first"}, "run_name .*art-patch send"),
        ({"entity": "me"}, "entity .*WANDB_ENTITY"),
    ],
)
def test_a_field_of_a_model_without_a_meaning_is_refused(field: dict[str, Any], words: str):
    with pytest.raises(art.ConfigError, match=words):
        art.TrainableModel(name="a", project="b", base_model="c", **field)
    assert art.Model(name="a", project="b", **dict.fromkeys(field)).project == "b"  # `None` says nothing


def test_a_config_of_the_model_is_what_its_updates_use():
    own = art.TrainConfig(total_steps=3, learning_rate=1e-3)
    model = art.TrainableModel(
        name="a", project="b", base_model="c", config=own, inference_engine="vllm",
        _internal_config={"peft_args": {"r": 4}, "engine_args": {"max_model_len": 99}},
    )  # fmt: skip
    assert asdict(model.update_config()) == asdict(art.TrainConfig(total_steps=3, learning_rate=1e-3, lora_rank=4))
    assert asdict(model.update_config(art.TrainConfig(epochs=1))) == asdict(art.TrainConfig(epochs=1, lora_rank=4))
    assert model.engine_options() == {"engine": "vllm", "max_model_len": 99}


# --- records ---


def test_a_trajectory_and_a_group_take_older_arguments():
    run = art.Trajectory(messages=[USER])  # type: ignore[call-arg]
    assert (run.messages_and_choices, run.reward) == ([USER], 0.0)
    with pytest.raises(ValueError, match="say the same"):
        art.Trajectory(messages=[USER], messages_and_choices=[USER])  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        art.Trajectory(rewards=1.0)  # type: ignore[call-arg]
    model = art.Model(name="counter", project="p")
    group = art.TrajectoryGroup(model=model, trajectories=[run], metrics={"solved": True}, metadata={"a": 1}, logs=None)
    assert (group.metadata, group.metrics, len(group)) == ({"model": "counter", "a": 1}, {"solved": True}, 1)
    assert art.TrajectoryGroup.model_validate_json(group.model_dump_json()).model_dump() == group.model_dump()


def test_trajectories_alone_are_put_with_those_of_the_same_task():
    def run(question: str, answer: str, **metadata: Any) -> art.Trajectory:
        said: Any = [{"role": "user", "content": question}, choice(answer)]
        return art.Trajectory(messages_and_choices=said, metadata=metadata)

    choice: Any = lambda text: {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}  # noqa: E731
    group = art.TrajectoryGroup([run("x", "y")])
    a, b, c, d = run("1+1", "2"), run("1+1", "3"), run("2+2", "4", scenario_id="s"), run("1+1", "5", scenario_id="s")
    assert [[*found] for found in as_groups([a, group, c, b, d])] == [[*group], [a, b], [c, d]]


def test_rollouts_are_taken_in_each_shape_that_scripts_have_them_in():
    run = art.Trajectory(messages_and_choices=[USER])
    group = art.TrajectoryGroup([run], metadata={"scenario_id": "s"})
    assert as_groups(group) == [group]  # and not its trajectories one by one, without its scenario
    assert [[*found] for found in as_groups(run)] == [[run]]  # type: ignore[arg-type]
    mixed = as_groups([ValueError("a"), run, OSError("b")])
    assert [(len(found), [raised.type for raised in found.exceptions]) for found in mixed] == [
        (1, []), (0, ["ValueError", "OSError"]),
    ]  # fmt: skip
    for wrong in ([None], [[run]], ["text"]):
        with pytest.raises(art.ConfigError, match="is neither a Trajectory nor a TrajectoryGroup"):
            as_groups(wrong)  # type: ignore[arg-type]

    async def rollout() -> art.Trajectory:
        return run

    pending = art.TrajectoryGroup([rollout()])
    with pytest.raises(art.ConfigError, match=r"await art\.gather_trajectory_groups"):
        as_groups([pending])  # type: ignore[list-item]
    pending.close()


def test_a_trajectory_is_handed_over_by_code_that_cannot_return_it():
    async def solve(run: art.Trajectory | None) -> None:
        if run is not None:
            art.yield_trajectory(run)
            await asyncio.sleep(0)

    run = art.Trajectory(reward=1.0)
    assert asyncio.run(art.capture_yielded_trajectory(solve(run))) is run
    with pytest.raises(art.ConfigError, match="yielded no trajectory"):
        asyncio.run(art.capture_yielded_trajectory(solve(None)))
    with pytest.raises(art.ConfigError, match="capture_yielded_trajectory"):
        art.yield_trajectory(run)


# --- batches ---


@given(st.integers(0, 30), st.integers(1, 7), st.integers(0, 3), st.integers(0, 40))
def test_a_data_set_is_gone_through_once_an_epoch_and_from_where_it_stopped(
    size: int, groups_per_step: int, num_epochs: int, initial_step: int
):
    options: Any = {"groups_per_step": groups_per_step, "num_epochs": num_epochs, "use_tqdm": False}
    batches = [*art_patch.utils.iterate_dataset(range(size), **options)]
    for epoch in range(num_epochs):
        its = [batch for batch in batches if batch.epoch == epoch]
        assert sorted(item for batch in its for item in batch.items) == list(range(size))
        assert [batch.epoch_step for batch in its] == list(range(len(its)))
    assert [batch.step for batch in batches] == list(range(len(batches)))
    later = [*art_patch.utils.iterate_dataset(range(size), **options, initial_step=initial_step)]
    assert later == batches[initial_step:]


def test_batches_of_groups_are_gathered_ahead():
    begun: list[int] = []

    async def run(number: int, fails: bool = False) -> art.Trajectory:
        begun.append(number)
        await asyncio.sleep(0)
        if fails:
            raise ValueError(f"rollout {number}")
        return art.Trajectory(reward=number)

    def groups(failing: tuple[int, ...] = ()) -> Iterator[Any]:
        return (art.TrajectoryGroup(run(n, n in failing) for n in (2 * at, 2 * at + 1)) for at in range(7))

    async def collected(given_: Iterator[Any], **options: Any) -> list[list[list[float]]]:
        found = art.trajectory_group_batches(given_, batch_size=3, pbar_desc=None, **options)
        return [[[each.reward for each in group] for group in batch] async for batch in found]

    whole = asyncio.run(collected(groups()))
    assert [len(batch) for batch in whole] == [3, 3, 1]
    assert sorted(pair for batch in whole for pair in batch) == [[2 * at, 2 * at + 1] for at in range(7)]
    left = asyncio.run(collected(groups(), skip_batches=1))
    assert sorted(pair for batch in left for pair in batch) == [[2 * at, 2 * at + 1] for at in range(3, 7)]
    some = asyncio.run(collected(groups((3,)), max_batch_exceptions=1))
    assert sorted(pair for batch in some for pair in batch)[1] == [2]
    with pytest.raises(ValueError, match="rollout 3"):
        asyncio.run(collected(groups((3,))))

    async def first() -> int:
        begun.clear()
        found = art.trajectory_group_batches(groups(), batch_size=1, max_concurrent_batches=2, pbar_desc=None)
        await anext(found)
        await asyncio.sleep(0.05)
        return len(begun)

    assert asyncio.run(first()) <= 6  # of 14: two groups at once, and those that took the place of complete ones
    with pytest.raises(art.ConfigError, match="batch_size=0"):
        asyncio.run(anext(art.trajectory_group_batches([], batch_size=0)))  # type: ignore[arg-type]
