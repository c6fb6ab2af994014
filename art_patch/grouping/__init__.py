"""Trajectories in, groups of siblings out. Pure: no clock, no database, no model.

A trajectory's scenario is, in this order: the key that `group()` gave it, the key that `trajectory(scenario=...)` gave
it, or its task: system prompt, tools and first user message, with volatile parts masked. Trajectories under different
system prompts or tool sets are never siblings unless the user says so by a key.

Trajectories without a sibling stay ungrouped and wait for one.
"""

from __future__ import annotations

from art_patch.grouping.form import Grouping, form_groups
from art_patch.grouping.scenario import is_held_out, scenario_of

__all__ = ["Grouping", "form_groups", "is_held_out", "scenario_of"]
