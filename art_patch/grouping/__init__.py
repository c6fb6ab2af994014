"""Grouping: puts trajectories of one task into groups of siblings. Pure: no clock, no database, no model.

- `wording` masks the parts that differ between two requests for one task, such as dates, ids and addresses, reduces a
  text to the words that distinguish its task from others, and corrects typos.
- `scenario` computes the key of a task, unless the user gave one, and decides what is held out for the gate. It also
  asks an embedding model which tasks mean the same, if the caller has one.
- `form` makes the groups, also from several attempts within one run. A run without a sibling waits for one.
- `lone_runs` chooses the turns of runs without siblings that are answered again, and the runs that the app's own
  function repeats, so that these runs get some.
"""

from art_patch.grouping.form import Grouping, form_groups
from art_patch.grouping.lone_runs import (
    REPLAYED, Replay, ReplayConfig, ResampleConfig, ResampleTurn, branch_group, choose_comparisons, choose_replays,
    choose_turns, offer_of, turn_group,
)
from art_patch.grouping.scenario import (
    Embed, embed_with, given_scenario, is_held_out, is_user_held_out, scenario_of, task_key, task_of,
)
