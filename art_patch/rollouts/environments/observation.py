"""What a player of a Gymnasium or PettingZoo environment sees, as text, and its answer as one of their actions.

Actions of `Discrete` spaces are known by their numbers, or by names that the script gives them. The last one in an
answer counts, so that a model may think aloud first. Other spaces need an environment class that overrides
`parse_action`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_patch.errors import ConfigError
from art_patch.rollouts.environments.environment import IllegalAction


@dataclass(frozen=True, slots=True)
class Observation:
    """A state, as its player sees it.

    Attributes:
        observation: as the environment gave it.
        info: likewise.
        legal: actions that are possible now; `None` if they cannot be counted.
        text: as the environment draws itself, if it was made with `render_mode="ansi"`.
        player: whose turn it is; empty where there is only one.
        space: of actions.
    """

    observation: Any
    info: Mapping[str, Any]
    legal: tuple[int, ...] | None
    text: str | None
    player: str
    space: Any


def observe(environment: Any, observation: Any, info: Mapping[str, Any], space: Any, player: str = "") -> Observation:
    """Return the state as its player sees it; an `action_mask` in the observation or the info says what is legal."""
    from gymnasium.spaces import Discrete

    legal = None
    if isinstance(space, Discrete):
        inside = observation.get("action_mask") if isinstance(observation, Mapping) else None
        mask = info.get("action_mask") if inside is None else inside
        numbers = range(int(space.start), int(space.start) + int(space.n))
        legal = tuple(number for place, number in enumerate(numbers) if mask is None or mask[place])
    text = environment.render() if getattr(environment, "render_mode", None) == "ansi" else None
    return Observation(observation, info, legal, text, player, space)


def describe(state: Observation, names: Sequence[str] | None) -> str:
    """Return a state as text: how it draws itself, else its observation; then what is legal.

    Args:
        state: the state.
        names: of actions, the first for the lowest number.
    """
    whole: Any = state.observation
    of_classic_games = isinstance(whole, Mapping) and "observation" in whole  # its mask stands beside it
    observation: Any = whole["observation"] if of_classic_games else whole
    if hasattr(observation, "tolist"):  # NumPy cuts long arrays short
        observation = observation.tolist()
    shown = str(observation) if state.text is None else state.text
    if state.legal is None:
        return shown
    return f"{shown}\nLegal actions: {', '.join(_name(action, state, names) for action in state.legal)}"


def parse(answer: str, state: Observation, names: Sequence[str] | None) -> int:
    """Return the last action that the answer names.

    Args:
        answer: of the agent.
        state: the state that it was told of.
        names: of actions, the first for the lowest number.

    Raises:
        IllegalAction: it names none, or one that is not legal now.
        ConfigError: the space's actions cannot be counted.
    """
    if state.legal is None:
        raise ConfigError(f"actions of {state.space} have no numbers; override parse_action(answer, state)")
    if names is None:
        found = [int(each) for each in re.findall(r"(?<![\w.-])-?\d{1,9}(?![\w]|\.\d)", answer, re.ASCII)]
    else:
        places = {name.casefold(): int(state.space.start) + place for place, name in enumerate(names)}
        longest_first = sorted(places, key=len, reverse=True)
        pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
        found = [places[each] for each in re.findall(pattern, answer.casefold())]
    possible = ", ".join(_name(action, state, names) for action in state.legal)
    if not found:
        raise IllegalAction(f"That names no action. Legal actions: {possible}")
    if found[-1] not in state.legal:
        raise IllegalAction(f"{_name(found[-1], state, names)} is not legal now. Legal actions: {possible}")
    return found[-1]


def _name(action: int, state: Observation, names: Sequence[str] | None) -> str:
    return str(action) if names is None else names[action - int(state.space.start)]
