"""A script in the manner of those for OpenPipe ART: two turns a rollout, three updates.

`test_by_hand.py` runs it as whoever comes from there would: with these two imports changed and nothing else.
"""

import asyncio
import os

import art
from art.local import LocalBackend

WORDS = ("plum", "pear", "apple", "bread", "lemon", "onion", "grape", "honey")
SIBLINGS = 8
STEPS = 3

model = art.TrainableModel(name="counter", project="by-hand", base_model=os.environ["BASE_MODEL"])


def foreign(text):
    """The share of characters beyond ASCII: what a random model learns far above its noise."""
    return sum(not character.isascii() for character in text) / max(1, len(text))


@art.retry(exceptions=(ConnectionError,))
@art.limit_concurrency(32)
async def rollout(model: art.Model, word: str, seed: int, is_validation: bool) -> art.Trajectory:
    client = model.openai_client()
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": "You count."}],
        reward=0,
        metadata={"scenario_id": word, "validation": is_validation},
    )
    for question in (f"how many {word}?", "sure?"):
        trajectory.messages_and_choices.append({"role": "user", "content": question})
        async with trajectory.track_duration("completion"):
            completion = await client.chat.completions.create(
                model=model.name, messages=trajectory.messages(), max_completion_tokens=6, seed=seed
            )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        trajectory.reward += foreign(choice.message.content or "") / 2
        trajectory.metrics["ended"] = choice.finish_reason == "stop"
    return trajectory.finish()


def groups_of(step, is_validation=False):
    return (
        art.TrajectoryGroup(
            rollout(model, word, 10_000 * step + 100 * place + sibling, is_validation) for sibling in range(SIBLINGS)
        )
        for place, word in enumerate(WORDS)
    )


async def main():
    backend = LocalBackend()
    await model.register(backend)
    rewards = []
    for step in range(await model.get_step(), STEPS):
        train_groups = await art.gather_trajectory_groups(groups_of(step), pbar_desc="gather", max_exceptions=4)
        rewards.append(sum(each.reward for group in train_groups for each in group) / SIBLINGS / len(WORDS))
        await model.delete_checkpoints()
        await model.train(train_groups, config=art.TrainConfig(learning_rate=5e-2))
    val_groups = await art.gather_trajectory_groups(groups_of(STEPS, is_validation=True), pbar_desc="val")
    rewards.append(sum(each.reward for group in val_groups for each in group) / SIBLINGS / len(WORDS))
    await model.log(val_groups)
    backend.close()
    return rewards


if __name__ == "__main__":
    print(asyncio.run(main()))
