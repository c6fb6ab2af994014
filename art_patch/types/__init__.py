"""The records that stages hand to each other: frozen dataclasses, standard library only.

Flow: the recorder makes a `Call` for each call of the app, and the store keeps it with the `TrajectoryInfo` of its run.
The job reads a `Trajectory`, forms a `Group` of siblings, gets a `Score` for each sibling, trains, and publishes a
`Policy`. A stage takes records and returns records; only `pipeline` and the recorder's writer thread use the store.

Units: `at` and `*_at` are seconds since the Unix epoch, `*_ms` milliseconds. Ids are uuid7 hex strings unless the
caller gave one. `None` means unknown or absent; an empty tuple means "known to be empty".
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.types.app_records import (
        COPIES, ENGINE_FULL, JSON, LEARN_HEADER, LEFT_ALONE, REFUSED, REPLAY, REPLAY_FROM, REPLAY_OF, UNREACHABLE,
        UPSTREAM, WAIT_HEADER, Api, CallStatus, Correction, Mode, Origin, PolicyState, Route, Score, SpanInfo, SpanKind,
        TrajectoryInfo,
    )
    from art_patch.types.calls import AppReport, Call, Choice, Record
    from art_patch.types.jobs import (
        CHALLENGERS, CONTINUABLE, IMPORTED, MOVES, UPSTREAM_ARM, ArmCall, ArmTraffic, Group, Judgement, KnownScenario,
        Policy, RunValue, Served, TrainedRow, Trajectory, UpstreamChange, Usage, check_move,
    )
else:
    # Python takes a millisecond to make such a class. So the modules that `patch()` does not need are loaded when they
    # are first used: `calls` by the writer thread, `jobs` by the job.
    __getattr__ = lazily()
