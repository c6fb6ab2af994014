"""Three rollouts in the manner of OpenPipe ART's best-known examples: 2048, tic-tac-toe with self-play, multiplication.

`test_by_hand.py` runs them with the import line changed and nothing else. What a random model says is no move, so the
games read one out of whatever it says.
"""

import asyncio
import math
import random

import art
import openai
from openai import AsyncOpenAI
from pydantic import BaseModel

MOVES = ("left", "right", "up", "down")


class Game2048:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.board = [[0] * 4 for _ in range(4)]
        self.drop()

    def drop(self):
        free = [(row, column) for row in range(4) for column in range(4) if not self.board[row][column]]
        row, column = self.random.choice(free)
        self.board[row][column] = 2

    def render(self):
        return "\n".join("|".join(str(tile or "_") for tile in row) for row in self.board)

    def move(self, said):
        for _ in range(MOVES.index(read(said, MOVES))):
            self.board = [list(row) for row in zip(*self.board[::-1], strict=True)]
        slid = [[tile for tile in row if tile] for row in self.board]
        after = [row + [0] * (4 - len(row)) for row in slid]
        if after == self.board:
            raise ValueError("nothing moves")
        self.board = after
        self.drop()


def read(said, options):
    if not said:
        raise ValueError("nothing was said")
    return options[sum(said.encode()) % len(options)]


@art.retry(exceptions=(openai.LengthFinishReasonError,))
async def play_2048(model: art.Model, step: int, is_validation: bool) -> art.Trajectory:
    game, moves = Game2048(step), 0
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": "You play 2048. Answer like so: <move>left</move>"}],
        metadata={"game_id": step, "step": step, "validation": is_validation},
        reward=0,
    )
    while moves < 4:
        trajectory.messages_and_choices.append({"role": "user", "content": game.render()})

        async def get_completion():
            client = model.openai_client()
            return await client.chat.completions.create(
                max_completion_tokens=4, messages=trajectory.messages(), model=model.name
            )

        chat_completion = await get_completion()
        choice = chat_completion.choices[0]
        content = choice.message.content
        assert isinstance(content, str)
        trajectory.messages_and_choices.append(choice)
        try:
            game.move(content)
            moves += 1
        except ValueError:
            trajectory.reward = -1 + math.log(moves + 1) / math.log(100)
            break
    else:
        trajectory.reward = 2
    trajectory.metrics["num_moves"] = moves
    trajectory.metrics["win"] = trajectory.reward == 2
    return trajectory


class Scenario(BaseModel):
    step: int
    split: str = "train"


class PlayerState(BaseModel):
    trajectory: art.Trajectory
    invalid_move: bool = False


@art.retry(exceptions=(openai.LengthFinishReasonError,))
async def play_tic_tac_toe(x_model: art.Model, o_model: art.Model, scenario: Scenario) -> list[art.Trajectory]:
    cells, board = [row + column for row in "ABC" for column in "123"], {}
    players = {
        symbol: PlayerState(
            trajectory=art.Trajectory(
                messages_and_choices=[{"role": "system", "content": f"You play tic-tac-toe as {symbol}."}],
                reward=0,
                metadata={"model_name": model.name, "step": scenario.step},
            )
        )
        for symbol, model in (("x", x_model), ("o", o_model))
    }
    for number in range(3):
        symbol, model = ("x", x_model) if number % 2 == 0 else ("o", o_model)
        trajectory = players[symbol].trajectory
        trajectory.messages_and_choices.append({"role": "user", "content": " ".join(board.get(c, c) for c in cells)})
        client = model.openai_client()
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            max_completion_tokens=4,
            temperature=1.0,
            extra_body=None,
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        try:
            cell = read(choice.message.content, cells)
            if cell in board:
                raise ValueError("taken")
            board[cell] = symbol
        except ValueError:
            players[symbol].invalid_move = True
            break
    for symbol, player in players.items():
        held = [cell for cell, by in board.items() if by == symbol]
        player.trajectory.reward = -2 if player.invalid_move else sum(cells.index(cell) for cell in held) / 10
        player.trajectory.metrics["invalid_move"] = 1 if player.invalid_move else 0
    return [player.trajectory for player in players.values()]


async def multiply(model: art.Model, scenario: Scenario) -> art.Trajectory:
    client = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    a, b = scenario.step + 2, scenario.step + 3
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": f"What is {a} x {b}?"}], reward=0, metadata={"a": a, "b": b}
    )
    completion = await client.chat.completions.create(
        model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=4
    )
    trajectory.messages_and_choices.append(completion.choices[0])
    said = completion.choices[0].message.content or ""
    trajectory.reward = -abs(len(said) - len(str(a * b)))
    await client.close()
    return trajectory


async def main(model):
    """Play, and learn from what was played: a step for each game."""
    steps = []
    train_groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup(play_2048(model, step, False) for _ in range(8)) for step in range(3)),
        pbar_desc="2048",
        max_exceptions=10,
    )
    steps.append(await model.train(train_groups, config=art.TrainConfig(learning_rate=1e-4)))
    games = await art.gather_trajectories(
        (play_tic_tac_toe(model, model, Scenario(step=0)) for _ in range(8)), pbar_desc="tic-tac-toe"
    )
    sides = [art.TrajectoryGroup(side) for side in zip(*games, strict=True)]
    await model.delete_checkpoints()
    steps.append(await model.train(sides, config=art.TrainConfig(learning_rate=1e-4)))
    groups = await asyncio.gather(
        *(art.gather_trajectory_groups([art.TrajectoryGroup(multiply(model, Scenario(step=step)) for _ in range(8))])
          for step in range(3))
    )  # fmt: skip
    steps.append(await model.train([group for (group,) in groups], config=art.TrainConfig(learning_rate=1e-4)))
    return steps
