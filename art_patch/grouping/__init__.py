"""Trajectories in, groups of siblings out. Pure: no clock, no database, no model.

A trajectory's scenario is, in this order: the key that `group()` gave it, the key that `trajectory(scenario=...)` gave
it, or its task: system prompt, tools and what the first user message says. A key from the user wins over everything.

- `masks` takes out what differs between two asks of one task: dates, ids, addresses, names around the text.
- `wording` keeps what tells a task from others, so that texts that differ in case, punctuation, courtesies or the order
  of their halves have one key; `spelling` mends typos first. A number, a name or any other word makes another task.
- `embeddings` asks a model instead, if the caller has one.
- `spans` finds attempts at one task within a run that has no siblings.

Trajectories under different system prompts or tool sets are never siblings unless the user says so, by a key or with
`across`. Those without a sibling stay ungrouped and wait for one; `resample` makes them some.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.grouping.embeddings import Embed, embed_with
    from art_patch.grouping.form import Grouping, form_groups
    from art_patch.grouping.replay import REPLAYED, Replay, ReplayConfig, choose_comparisons, choose_replays, offer_of
    from art_patch.grouping.resample import ResampleConfig, ResampleTurn, choose_turns, turn_group
    from art_patch.grouping.scenario import given_scenario, is_held_out, scenario_of, task_key, task_of
else:
    __getattr__ = lazily(
        __name__,
        {
            "embeddings": "Embed embed_with",
            "form": "Grouping form_groups",
            "replay": "REPLAYED Replay ReplayConfig choose_comparisons choose_replays offer_of",
            "resample": "ResampleConfig ResampleTurn choose_turns turn_group",
            "scenario": "given_scenario is_held_out scenario_of task_key task_of",
        },
    )
