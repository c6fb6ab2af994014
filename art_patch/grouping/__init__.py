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

from __future__ import annotations

from art_patch.grouping.form import Grouping, form_groups
from art_patch.grouping.scenario import is_held_out, scenario_of

__all__ = ["Grouping", "form_groups", "is_held_out", "scenario_of"]
