"""The records that stages hand to each other: frozen dataclasses, standard library only.

Flow: the patch makes a `Call`; the store keeps it under a `TrajectoryInfo`; the job reads `Trajectory` back, forms a
`Group` of siblings, gets a `Score` for each, trains, and publishes a `Policy`. A stage takes records and returns
records; only `pipeline` and the recorder's writer thread talk to the store.

Units: `*_at` is seconds since the Unix epoch, `*_ms` milliseconds. Ids are uuid7 hex strings unless a caller gave one.
Absent means `None`; an empty tuple means "known to be empty".

Making such a class takes Python a millisecond, so those that `patch()` does not need are made when first asked for:
`calls` by the writer thread, `jobs` by the job.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.types.app_records import (
        COPIES,
        JSON,
        REPLAY,
        UPSTREAM,
        Api,
        CallStatus,
        Correction,
        Mode,
        Origin,
        PolicyState,
        Route,
        Score,
        SpanInfo,
        SpanKind,
        TrajectoryInfo,
    )
    from art_patch.types.arms import ArmCall, ArmTraffic
    from art_patch.types.calls import AppReport, Call, Choice, Record
    from art_patch.types.jobs import Group, Judgement, Policy, TrainedRow, Trajectory
    from art_patch.types.states import CHALLENGERS, MOVES, check_move
    from art_patch.types.usage import RunValue, Served, Usage
else:
    __getattr__ = lazily(
        __name__,
        {
            "app_records": (
                "Api COPIES CallStatus Correction JSON Mode Origin "
                "PolicyState REPLAY Route Score SpanInfo SpanKind TrajectoryInfo UPSTREAM"
            ),
            "calls": "AppReport Call Choice Record",
            "jobs": "Group Judgement Policy TrainedRow Trajectory",
            "arms": "ArmCall ArmTraffic",
            "usage": "RunValue Served Usage",
            "states": "CHALLENGERS MOVES check_move",
        },
    )
