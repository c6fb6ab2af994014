"""Grouping: trajectories in, groups of siblings out. Pure: no clock, no database, no model.

A trajectory's scenario is the key that `group()` gave it, else the key of `trajectory(scenario=...)`, else its task:
system prompt, tools and the first user message. A key from the user always wins.

- `masks` replaces what differs between two requests for one task: dates, ids, addresses, names around the text.
- `wording` reduces a text to the words that distinguish its task from others, and corrects typos.
- `scenario` makes the key of a task, and decides which scenarios are held out for the gate.
- `embeddings` asks an embedding model as well, if the caller has one.
- `form` makes the groups, also from attempts within one run. A run without a sibling waits for one.
- `resample` and `replay` make siblings for runs that wait: a turn answered again, or the whole run repeated.

Runs with different system prompts or tools are never siblings, unless the user says so by a key or with `across`.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from art_patch.grouping.embeddings import Embed, embed_with
from art_patch.grouping.form import Grouping, form_groups
from art_patch.grouping.replay import REPLAYED, Replay, ReplayConfig, choose_comparisons, choose_replays, offer_of
from art_patch.grouping.resample import ResampleConfig, ResampleTurn, choose_turns, turn_group
from art_patch.grouping.scenario import given_scenario, is_held_out, scenario_of, task_key, task_of
