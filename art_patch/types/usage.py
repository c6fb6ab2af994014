"""What the store counts of a stretch of time, for `art-patch report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from art_patch.types.app_records import Mode


@dataclass(frozen=True, slots=True)
class Served:
    """The app's own calls that one policy answered, or upstream. Copies asked in the background are not among them.

    Attributes:
        policy: `NAME@STEP`; `None` is upstream.
        calls: how many.
        failed: how many of them ended in an error.
        latencies_ms: of those that were answered, in order of size.
        tokens: by the model that the app asked for: prompt tokens and completion tokens.
        unmetered: answered calls of which no count of tokens is known.
    """

    policy: str | None
    calls: int = 0
    failed: int = 0
    latencies_ms: tuple[float, ...] = ()
    tokens: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    unmetered: int = 0


@dataclass(frozen=True, slots=True)
class RunValue:
    """What a run that one policy answered alone is worth.

    Attributes:
        policy: that answered all its calls; `None` is upstream.
        reward: what the user or their code gave; the same scale for all runs. `None`: nobody said.
        judged: what it got among its siblings, which says something within its group only. `None`: not judged.
        group_id: its group.
        copy: the app never ran it; it was asked beside, or again.
    """

    policy: str | None
    reward: float | None = None
    judged: float | None = None
    group_id: str | None = None
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """A stretch of time.

    Attributes:
        since: its beginning, seconds since the epoch.
        until: its end.
        champion: the policy that serves now.
        mode: what the store says the apps do; `None` if each goes by its own setting.
        served: who answered, most calls first.
        fell_back: calls that were meant for one of our policies and went upstream, by reason.
        runs: what became of the runs that ended then.
        mixed: runs that several answered, so that their worth is nobody's.
        judge_usd: what the judge took, as far as prices are known.
        judge_unpriced: calls of the judge of unknown price.
        updates: policies trained then.
        update_s: how long that took, with every attempt that failed, was refused or interrupted; of policies older than
            this metric, and of attempts that were killed, only the steps that were kept.
        updates_untimed: how many of the policies do not say how long.
        updates_lost: updates that ran then and made no policy.
        engine_s: how long an engine was announced to the apps; `None` if none ever was.
    """

    since: float
    until: float
    champion: str | None = None
    mode: Mode | None = None
    served: tuple[Served, ...] = ()
    fell_back: Mapping[str, int] = field(default_factory=dict[str, int])
    runs: tuple[RunValue, ...] = ()
    mixed: int = 0
    judge_usd: float = 0.0
    judge_unpriced: int = 0
    updates: int = 0
    update_s: float = 0.0
    updates_untimed: int = 0
    updates_lost: int = 0
    engine_s: float | None = None
