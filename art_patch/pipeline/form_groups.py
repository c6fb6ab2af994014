"""The step `group`: forms groups of siblings from finished trajectories and writes them to the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from art_patch._lib.ids import new_id
from art_patch.grouping import Grouping, form_groups
from art_patch.pipeline.cycle_run import CycleConfig, Run
from art_patch.types import Group, Trajectory


def form(pending: Sequence[Trajectory], config: CycleConfig, new_id: Callable[[], str]) -> Grouping:
    """Return the groups that a cycle would form of these trajectories, without writing anything.

    Args:
        pending: finished trajectories that are in no group yet, oldest first.
        new_id: makes the ids of groups, and of trajectories that are made from spans.
    """
    return form_groups(
        pending,
        new_id=new_id,
        min_size=config.min_group_size,
        max_size=config.max_group_size,
        holdout_share=config.holdout_share,
        # Without resampling and replay a run alone can never get siblings, so it needs no group of its own.
        singles=config.resample is not None or config.replay is not None,
        across=config.across,
        # If the embedding endpoint is down, words alone decide, and `Grouping.embeddings` holds the reason.
        embed=config.embed,
    )


def group(run: Run, ended: Sequence[str] = ()) -> Grouping:
    """Form groups of all finished trajectories that are in no group, and write the groups to the store.

    Args:
        ended: ids of trajectories that the cycle has just replayed. They are complete, so they are grouped without
            waiting `settle_s`. If given, the metrics are named `regroup` instead of `group`.
    """
    config, store = run.config, run.store
    pending = store.read.ungrouped(settled_before=run.now - config.settle_s, ended=ended)
    run.progress("group", 0, len(pending))
    grouping = form(pending, config, new_id)
    if grouping.derived:
        store.write([record for its in grouping.derived for record in (its.info, *its.calls)])
        # A run that was cut into several derived trajectories goes into a group of its own. Without it the next cycle
        # would find the run in no group and cut it again.
        run_of = {call.id: trajectory for trajectory in pending for call in trajectory.calls}
        sources = {run_of[str(call.shadow_of)].id: its for its in grouping.derived for call in its.calls[:1]}
        whole = {trajectory.id: trajectory for trajectory in pending}
        taken = [Group(new_id(), f"run:{key}", "single", (whole[key],)) for key in sources]
        store.ledger.add_groups(taken, state="in spans", now=run.now)
    store.ledger.add_groups(grouping.groups, now=run.now)
    run.progress("group", len(pending), len(pending), f"{len(grouping.groups)} groups")
    # Reasons for trajectories in no group go into the report: a user who sees no training looks there first.
    run.metrics["regroup" if ended else "group"] = {
        "trajectories": len(pending),
        "groups": len(grouping.groups),
        "held_out": sum(group.held_out for group in grouping.groups),
        "left": dict(grouping.left),
    } | ({"embeddings": grouping.embeddings} if grouping.embeddings else {})
    return grouping
