"""A script in the manner of OpenPipe ART, against a real engine and a real trainer, each in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

import art_patch as art
from art_patch.local import LocalBackend
from art_patch.store import Store, open_store
from art_patch.training import advantages_of_groups
from art_patch.trajectories import exact_of
from art_patch.types import Group
from tests.benchmarks.explicit_update import gathered as rollouts_of_which_some_raise
from tests.support.tiny import make_tiny_model

T = TypeVar("T")

SCRIPT = Path(__file__).with_name("art_script.py")
IMPORTS = {
    "import art\n": "import art_patch as art\n",
    "from art.local import LocalBackend\n": "from art_patch.local import LocalBackend\n",
}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def backend(home: Path) -> Iterator[LocalBackend]:
    with LocalBackend(path=home, engine="embedded", threads=1) as made:
        yield made


def make_model(base: Path, name: str = "counter") -> art.TrainableModel[None]:
    return art.TrainableModel(name=name, project="by-hand", base_model=str(base))


def run(model: art.Model[Any], script: Coroutine[Any, Any, T]) -> T:
    """The script, and its connections closed."""

    async def whole() -> T:
        try:
            return await script
        finally:
            await model.openai_client().close()

    return asyncio.run(whole())


def make_registered(backend: LocalBackend, base: Path) -> art.TrainableModel[Any]:
    model = make_model(base)
    asyncio.run(model.register(backend))
    return model


async def asked_meanwhile(model: art.Model[Any], work: asyncio.Task[Any], answered: list[str]) -> None:
    """Ask one request after another until the work is done; each that fails fails the test."""
    client = model.openai_client()
    while not work.done():
        answer = await client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": "hi"}], max_tokens=2
        )
        answered.append(answer.model)


def test_a_script_for_openpipe_art_learns_with_its_imports_changed(
    backend: LocalBackend, base: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    make_registered(backend, base)  # an engine serves, as `art-patch serve` would, and the script joins it
    monkeypatch.setenv("ART_PATCH_HOME", str(home))
    monkeypatch.setenv("BASE_MODEL", str(base))
    source, script = SCRIPT.read_text(), dict[str, Any]()
    for theirs, ours in IMPORTS.items():
        assert theirs in source
        source = source.replace(theirs, ours)
    # Its rate moves a random model further in one update than the limits of a real one allow.
    rate = "learning_rate=5e-2"
    assert rate in source
    source = source.replace(rate, f"{rate}, max_kl_nats=None, max_clip_fraction=None")
    exec(compile(source, SCRIPT, "exec"), script)
    rewards = run(script["model"], script["main"]())
    assert rewards[-1] > rewards[0] + 0.03, rewards
    assert script["model"].get_inference_name() == "counter@3"

    store = open_store(f"sqlite:///{home}/by-hand/store.db")
    trained, spent = store.read.groups(state="trained"), store.read.groups(state="spent")
    assert (len(trained), len(spent)) == (24, 8)
    assert {group.scenario_key for group in trained} == {f"scenario:{word}" for word in script["WORDS"]}
    assert all(group.held_out for group in spent)
    calls = [call for group in trained for run in group.trajectories for call in run.calls]
    assert (len(calls), {call.untrainable for call in calls}) == (2 * 192, {None})
    assert {policy.name: policy.state for policy in store.ledger.policies()} == {
        "counter@0": "retired", "counter@1": "rejected", "counter@2": "retired", "counter@3": "champion",
    }  # fmt: skip
    assert store.ledger.policy("counter@1").metrics["train"]["logprob_gap_nats"] < 1e-4  # type: ignore[union-attr]
    assert store.verify() == []
    store.close()
    lines = [json.loads(line) for line in (home / "by-hand" / "history.jsonl").read_text().splitlines()]
    assert [(line["step"], "train/loss" in line, "val/reward" in line) for line in lines] == [
        (0, True, False), (1, True, False), (2, True, False), (3, False, True),
    ]  # fmt: skip


def test_checkpoints_that_are_not_needed_are_deleted(backend: LocalBackend, base: Path, home: Path):
    model, adapters = make_registered(backend, base), home / "by-hand" / "adapters"

    async def delete() -> tuple[list[str], list[str]]:
        await model.log([], metrics={"score": 1.0})
        with (home / "by-hand" / "history.jsonl").open("a") as history:
            history.write('{"step": 2, "val/score": 2.0}\n{"step": 2, "val')
        return await model.delete_checkpoints("val/score"), await model.delete_checkpoints("val/other")

    assert sorted(path.name for path in adapters.iterdir()) == ["counter@2", "counter@3"]
    assert run(model, delete()) == ([], ["counter@2"])
    assert [path.name for path in adapters.iterdir()] == ["counter@3"]


def test_a_session_asks_and_trains_and_what_was_scored_alike_teaches_nothing(backend: LocalBackend, base: Path):
    model = make_model(base)

    async def session() -> art.Trajectory:
        async with art.start(model, backend=backend) as api:
            trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": "hi"}], reward=0.0)
            await api.create_completion(trajectory, tools=[LOOK], max_tokens=3)
            with pytest.raises(art.ConfigError, match="stream"):
                await api.create_completion(trajectory, stream=True)
            found = await api.train([art.TrajectoryGroup([trajectory, trajectory.model_copy(deep=True)])])
            assert (found.step, "scored alike" in found.reason) == (3, True)
            return trajectory

    trajectory = asyncio.run(session())
    assert (len(trajectory.choices()), trajectory.tools) == (1, [LOOK])


def test_another_script_joins_the_engine_or_is_told_why_not(backend: LocalBackend, base: Path, home: Path):
    def joined(model: art.TrainableModel[Any], **options: Any) -> str | None:
        with LocalBackend(path=home, **options) as other:
            asyncio.run(model.register(other))
        return model.inference_base_url

    up = make_registered(backend, base).inference_base_url
    assert joined(make_model(base)) == up
    for model, options, why in (
        (make_model(base), {"threads": 2}, "leave out: threads"),
        (make_model(base, "another"), {}, "give 'another' a project of its own"),
        (make_model(make_tiny_model(home / "other", seed=1)), {}, "which is not"),
    ):
        with pytest.raises(art.ConfigError, match=why):
            joined(model, **options)


def test_policies_are_evaluated_side_by_side_and_what_is_dropped_hangs_nobody(backend: LocalBackend, base: Path):
    model = make_registered(backend, base)

    async def rollout(asked: art.Model[Any], word: str) -> art.Trajectory:
        user: Any = {"role": "user", "content": word}
        answer = await asked.openai_client().chat.completions.create(
            model=asked.name, messages=[user], max_tokens=3, temperature=0
        )
        metrics = {"policy": int(answer.model.partition("@")[2])}
        return art.Trajectory(messages_and_choices=[user, answer.choices[0]], reward=metrics["policy"], metrics=metrics)

    async def evaluate() -> art.Evaluation:
        found = await art.evaluate(rollout, [str(n) for n in range(60)], [await model.checkpoint(0), model], runs=2)
        # The model that `checkpoint` made is gone, and its client's sockets must not be closed behind the loop.
        gc.collect()
        again = [rollout(model, "again") for _ in range(120)]
        await asyncio.wait_for(art.gather_trajectories(again), 60)
        with pytest.raises(art.StoreError, match="there is no policy counter@7"):
            await model.checkpoint(7)
        return found

    found = run(model, evaluate())
    assert [(each.model, each.runs, each.metrics["policy"].value) for each in found.models] == [
        ("counter@0", 120, 0.0), ("counter", 120, 3.0),
    ]  # fmt: skip
    assert (found["counter"].better_by, found["counter"].at_least) == (3.0, 3.0)
    assert model.get_inference_name() == "counter@3"


def test_what_a_coroutine_asks_is_captured_with_its_tokens(backend: LocalBackend, base: Path):
    model = make_registered(backend, base)

    async def agent() -> None:
        client = model.openai_client().with_options(max_retries=0)
        user: Any = {"role": "user", "content": "hi"}
        first = await client.chat.completions.create(model=model.name, messages=[user], max_tokens=3, logprobs=True)
        said: Any = {"role": "assistant", "content": first.choices[0].message.content}
        await client.chat.completions.create(model="counter@3", messages=[user, said, user], max_tokens=3)
        assert first.choices[0].logprobs is not None
        art.auto_trajectory(required=True).reward = 1.0
        with pytest.raises(art.ConfigError, match="stream"):
            await client.chat.completions.create(model=model.name, messages=[user], stream=True)

    found = run(model, art.capture_auto_trajectory(agent()))
    assert (len(found.messages_and_choices), len(found.choices()), found.reward) == (4, 2, 1.0)
    assert [choice.art_patch["policy"] for choice in found.choices()] == ["counter@3"] * 2  # type: ignore[attr-defined]


def test_any_client_of_the_sdk_is_given_the_exact_tokens(backend: LocalBackend, base: Path):
    """Scripts for OpenPipe ART often make their own."""
    model = make_registered(backend, base)

    sampled: list[int] = []

    async def ask() -> list[art.Trajectory]:
        user: Any = {"role": "user", "content": "hi"}
        async with openai.AsyncOpenAI(
            base_url=model.inference_base_url, api_key=model.inference_api_key, max_retries=0
        ) as client:
            runs: list[art.Trajectory] = []
            for name, asked in ((model.name, {}), ("counter@3", {"logprobs": True})):
                answer = await client.chat.completions.create(model=name, messages=[user], max_tokens=3, **asked)
                assert (answer.choices[0].logprobs is not None) == bool(asked)
                assert "token_ids" not in (answer.choices[0].model_extra or {})
                sampled.append(answer.usage.completion_tokens)  # a random model may end its answer at once
                runs.append(art.Trajectory(messages_and_choices=[user, answer.choices[0]], reward=len(runs)))
            with pytest.raises(openai.NotFoundError, match="nobody"):
                await client.chat.completions.create(model="nobody", messages=[user])
            with pytest.raises(openai.BadRequestError, match="messages"):
                await client.chat.completions.create(model=model.name, messages="hi")  # type: ignore[arg-type]
            stream = await client.chat.completions.create(
                model=model.name, messages=[user], max_tokens=3, stream=True, extra_body={"ignore_eos": True}
            )
            assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"
            return runs

    runs = asyncio.run(ask())
    exact = [exact_of(run.choices()[0]) for run in runs]
    assert {fact.policy for fact in exact if fact} == {"counter@3"}
    assert [len(fact.token_ids or ()) for fact in exact if fact] == sampled
    assert [fact.params for fact in exact if fact] == [{"max_tokens": 3}, {"max_tokens": 3, "logprobs": True}]


def test_mistakes_of_the_script_are_told_before_anything_is_trained(backend: LocalBackend, base: Path):
    model = make_registered(backend, base)
    user: Any = {"role": "user", "content": "hi"}
    without = art.TrajectoryGroup(
        [art.Trajectory(messages_and_choices=[user, {"role": "assistant", "content": "yo"}], reward=1.0)]
    )

    async def train(groups: Any, **more: Any) -> Any:
        return await model.train(groups, **more)

    with pytest.raises(art.ConfigError, match="none of 0 choices in 1 groups carries its exact tokens"):
        asyncio.run(train([without]))
    with pytest.raises(art.ConfigError, match="eval_steps=2, but there is nothing to evaluate on; give eval_groups"):
        asyncio.run(train([without], config=art.TrainConfig(eval_steps=2), eval_groups=[art.TrajectoryGroup([])]))
    with pytest.raises(art.ConfigError, match="eval_steps does not say when"):
        asyncio.run(train([], eval_groups=[without]))
    with pytest.raises(art.ConfigError, match="is learned from, too; evaluate on others"):
        asyncio.run(train([without], config=art.TrainConfig(eval_steps=2), eval_groups=[without]))
    with pytest.raises(art.ConfigError, match="plot_tensors=True has no meaning here: `art-patch report`"):
        asyncio.run(train([], _config={"plot_tensors": True}))
    with pytest.warns(UserWarning, match="micro_batch_tokens"), pytest.raises(art.ConfigError):
        asyncio.run(train([], _config={"logprob_calculation_chunk_size": 8}))
    with pytest.raises(art.ConfigError, match=r"tinker_args=.* has no meaning here.*LocalBackend"):
        art.TrainableModel(name="a", project="b", base_model="c", _internal_config={"tinker_args": {}})
    with pytest.raises(art.ConfigError, match="not registered"):
        make_model(base).openai_client()


def test_a_crowd_is_trained_on_but_for_those_that_raise_and_nobody_waits(backend: LocalBackend, base: Path):
    """A hundred; `tests/benchmarks/explicit_update.py` takes a thousand, and measures."""
    model, answered = make_registered(backend, base), list[str]()

    async def crowd() -> tuple[list[art.TrajectoryGroup], int, art.TrainResult]:
        before, groups = await model.get_step(), await rollouts_of_which_some_raise(model, 100, 0.05, 1)
        config = art.TrainConfig(epochs=1, minibatches=1, lora_rank=4, eval_steps=1)
        others = await rollouts_of_which_some_raise(model, 20, 0.0, 1)
        update = asyncio.create_task(model.train(groups, config, eval_groups=others))
        await asked_meanwhile(model, update, answered)
        return groups, before, await update

    groups, before, result = run(model, crowd())
    failures = [failure for group in groups for failure in group.exceptions]
    assert [(failure.type, len(failure.trajectory.choices())) for failure in failures] == [("Raised", 1)] * 5  # type: ignore[union-attr]
    assert (result.metrics["trajectories"], result.step) == (95, before + 1)
    assert result.metrics["exception_rate"] == 0.05
    assert result.metrics["eval_kl_nats"] > 0
    assert f"counter@{before}" in answered


def test_rollouts_for_openpipe_art_run_and_are_learned_from(backend: LocalBackend, base: Path, home: Path):
    model = make_registered(backend, base)
    source, script = SCRIPT.with_name("art_rollouts.py").read_text(), dict[str, Any]()
    exec(
        compile(
            source.replace("import art\n", "import art_patch as art\n"), "art_rollouts.py", "exec", dont_inherit=True
        ),
        script,
    )
    store = open_store(f"sqlite:///{home}/by-hand/store.db")
    before = {group.id for group in groups_of(store)}
    first, *others = run(model, script["main"](model))
    assert [(result.step - first.step, result.reason) for result in (first, *others)] == [(0, ""), (1, ""), (2, "")]
    assert {"num_moves", "win"} <= first.metrics.keys()

    played = [group for group in groups_of(store) if group.id not in before]
    assert [len(group.trajectories) for group in played] == [8] * (3 + 2 + 3)
    # What a random model plays may be worth what its siblings' is, or just their mean: then there is nothing to learn.
    rewards = [
        [score.value for run in group.trajectories for score in run.scores if score.name == "reward"]
        for group in played
    ]
    # Nor is there in a run that was never asked: a game may end before the second player's turn.
    learned = sum(
        bool(advantage and run.calls)
        for group, advantages in zip(played, advantages_of_groups(rewards), strict=True)
        for run, advantage in zip(group.trajectories, advantages or (), strict=False)
    )
    assert sum(result.metrics["trajectories"] for result in (first, *others)) == learned
    store.close()


def groups_of(store: Store) -> list[Group]:
    return [group for state in ("trained", "spent", "dead") for group in store.read.groups(state=state)]
