"""The configuration of a cycle, the objects that all its steps share (store, engine, judge, metrics), and its report.

Each cycle leaves a report on disk: `cycles/TIME-ID.json` for programs, and a `.md` file for people. Reports are files
beside the store, so that they can be read when the store cannot be opened. They contain metrics and no text of any run.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, cast

from art_patch import grouping, rewards, serving, training
from art_patch._lib.atomic_files import replacing
from art_patch._lib.ids import new_id
from art_patch._lib.option import Option
from art_patch._lib.words import one_line, sentences, visible
from art_patch.gate import GateConfig
from art_patch.pipeline.taught import TeacherJudge
from art_patch.promotion import CanaryConfig
from art_patch.settings import Redact
from art_patch.types import JSON

if TYPE_CHECKING:  # so that the command line can read the options below without loading SQLAlchemy
    from art_patch.store import Store


class Progress(Protocol):
    """Protocol of the callback that steps call after each unit of work. If it raises an exception, the cycle ends."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` units of a stage are finished; `note` is a short text for people."""
        ...


@dataclass(frozen=True, slots=True)
class CycleConfig:
    """All settings of a cycle. `keep_days` and `keep_trajectories`: what is deleted when the cycle ends."""

    # A sub-agent or a tool may take that long before the next call.
    settle_s: Annotated[float, Option(help="Seconds without a call after which a trajectory counts as finished.")] = (
        60.0
    )
    min_group_size: int = 4  # siblings
    max_group_size: int = 16  # siblings, which the judge ranks in one request
    holdout_share: float = 0.2  # of the scenarios: for the gate only, never trained on
    holdout_users: bool = False  # this share of the users instead, with all their runs
    across: bool = False  # runs with the same words have the same task even if system prompts and tools differ
    embed: grouping.Embed | None = None  # puts tasks with different wordings into one group; `None`: words decide
    # With fewer groups, the update waits for the next cycle.
    min_groups: Annotated[int, Option(help="Smallest number of scored groups to train on.")] = 4
    # Of runs without siblings, and of held-out runs for the gate. Off, because a replay executes the user's code.
    replay: grouping.ReplayConfig | None = None
    resample: grouping.ResampleConfig | None = None  # the champion answers recorded turns again, to make siblings
    checks: Sequence[rewards.Check] = ()  # the user's functions that score trajectories
    combination: rewards.Combination = rewards.RULER  # makes one reward of several scores
    defence: rewards.DefenceConfig = field(default_factory=rewards.DefenceConfig)  # against a judge that is fooled
    train: training.TrainConfig = field(default_factory=training.TrainConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    # A candidate that passed the gate becomes champion (`auto`), waits for a person's decision (`approve`), or is
    # tested on `canary_percent` % of the app's sessions, until the test that `canary` configures ends.
    promotion: Literal["auto", "approve", "canary"] = "auto"
    canary_percent: float = 5.0
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    # Finished work is kept. A whole gate is one piece of work, because half of a gate has no result.
    max_minutes: Annotated[
        float | None,
        Option(least=1, env=True, help="Begin no new piece of work after so many minutes. The next cycle continues."),
    ] = None
    idle_minutes: float | None = None  # nothing is done if apps made calls within so many minutes
    keep_days: float | None = None  # delete trajectories whose newest call is older
    keep_trajectories: int | None = None  # delete all but so many of the newest
    redact: Redact = None  # applied to the answers of a gate before they are kept
    search: bool = True  # extend the search index when the cycle ends; else delete it


# `art-patch score` has no engine, so grouping and scoring take a `Run`. A `Cycle` is one, too.
@dataclass(slots=True)
class Run:
    """The objects that the steps `group` and `score` need."""

    store: "Store"
    judge: rewards.OrderedJudge
    config: CycleConfig
    progress: Progress
    now: float  # when the cycle began, seconds since the epoch; all steps use this one time
    # Results of the steps, by the step's name; they become a part of the report.
    metrics: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    @property
    def teacher(self) -> TeacherJudge | None:
        """The teacher that is learned from in place of a judge; `None` if there is none."""
        return self.judge if isinstance(self.judge, TeacherJudge) else None


@dataclass(slots=True)
class Cycle(Run):
    """The objects that all steps of a cycle share: those of `Run`, the engine, the adapters and a name for the log."""

    engine: serving.EngineClient
    adapters: Path  # directory of the published policies; its parent is the project's directory
    who: str  # the person or job that the ledger and the audit log record
    # Decides in the gate in place of `judge`, whose scores are then shown beside it; `None`: `judge` decides.
    gate_judge: rewards.OrderedJudge | None = field(default=None, kw_only=True)


Outcome = Literal[
    "promoted", "rejected", "learns", "nothing to do", "out of time", "not idle", "waits for approval", "canary",
    "failed",
]  # fmt: skip

LONG = ("history", "corrections_upto", "checks", "config", "data_sha256", "gains", "ruined", "results", "job")
"""Names of metrics that are too long for people; only the store and `--json` show them."""
KEPT = 200  # number of reports that are kept; older ones are deleted
LAST_RETRAIN = "last_retrain.json"
"""File in the project's directory that tells how the newest `art-patch retrain` ended."""
_WITH_TEXT = ("round_trips",)  # metrics that quote recorded words; the erasure of a user does not look into reports


@dataclass(frozen=True, slots=True)
class CycleReport:
    """The result of a cycle."""

    # How the cycle ended. `canary`: a policy is now under test on the app's traffic. `learns`: upstream answers, and a
    # policy is trained on. `waits for approval`: the candidate won, and a person decides. `out of time`, `not idle`:
    # the remaining steps are left to the next cycle. `failed` appears in report files only, because the cycle raised an
    # error instead of returning.
    outcome: Outcome
    reason: str
    champion: str | None  # which serves when the cycle ends; `None`: upstream
    candidate: str | None = None  # which this cycle trained or tested, if any
    metrics: JSON = field(default_factory=dict[str, Any])  # of every step that ran, by the step's name


def write_report(
    report: CycleReport, directory: Path, *, who: str, began_at: float, took_s: float,
    stages_s: Mapping[str, float] | None = None,
) -> Path | None:  # fmt: skip
    """Write the report to the project's directory as JSON and Markdown; delete reports beyond the newest `KEPT`.

    `stages_s` are the seconds that the stages took, by the names under which they report their progress.

    Returns the JSON file's path, or `None` if it could not be written, which does not fail the cycle.
    """
    folder = directory / "cycles"
    # The time sorts the files; the end of an id keeps two cycles of one second apart.
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(began_at))}-{new_id()[-8:]}"
    facts: dict[str, Any] = asdict(report) | {"began_at": began_at, "took_s": round(took_s, 3), "who": who}
    facts["stages_s"] = {stage: round(seconds, 3) for stage, seconds in (stages_s or {}).items()}
    facts["metrics"] = _without_text(report.metrics)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        # The JSON file last: whoever finds it finds the other one, too.
        for kind, content in (("md", to_markdown(facts)), ("json", json.dumps(facts, indent=1, default=str) + "\n")):
            with replacing(folder / f"{name}.{kind}") as file:
                file.write(content.encode())
        for old in sorted(folder.glob("*-*.json"), key=lambda path: path.name)[:-KEPT]:
            old.unlink()
            old.with_suffix(".md").unlink(missing_ok=True)
    except OSError:
        return None
    return folder / f"{name}.json"


def keep_last_retrain(directory: Path, *, ended_at: float, took_s: float, exit_code: int, outcome: str) -> None:
    """Note how the newest `art-patch retrain` ended, also if its cycle never began, for metrics; a failure is ignored.

    `outcome` is a cycle's, or the class of the error. A project that has no directory gets none.
    """
    facts = {"ended_at": ended_at, "took_s": round(took_s, 3), "exit_code": exit_code, "outcome": outcome}
    with suppress(OSError):
        if directory.is_dir():
            with replacing(directory / LAST_RETRAIN) as file:
                file.write(f"{json.dumps(facts)}\n".encode())


def last_retrain(directory: Path) -> JSON | None:
    """Return what `keep_last_retrain` noted; `None` if there is nothing."""
    try:
        facts: Any = json.loads((directory / LAST_RETRAIN).read_text("utf-8"))
        numbers = {name: float(facts[name]) for name in ("ended_at", "took_s", "exit_code")}
        if not all(map(math.isfinite, numbers.values())):
            return None
        return numbers | {"outcome": str(facts["outcome"])}
    # Somebody else may have written it.
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def to_markdown(facts: JSON) -> str:
    """Return the content of a report's JSON file as Markdown for people."""
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts["began_at"]))
    metrics: dict[str, Any] = dict(facts["metrics"])
    costs = [values["cost_usd"] for values in metrics.values() if isinstance(values, dict) and "cost_usd" in values]
    verdict, *rests_on = sentences(facts["reason"]) or [""]
    lines = [
        f"# {facts['outcome']}" + (f": {facts['candidate']}" if facts["candidate"] else ""),
        "",
        # A line each, because a reason may quote an error message with line breaks or Markdown's headings.
        verdict,
        "",
        *(f"- {each}" for each in rests_on),
        f"- began {began}, took {facts['took_s']:,.0f} s",
        f"- champion {facts['champion'] or 'none'}",
        f"- started by {one_line(facts['who'])}",
    ]
    if costs:
        # `None`: the price of an answer is not known. The sum is then a lower bound and says so.
        known = [cost for cost in costs if cost is not None]
        lines.append(f"- the judge cost {sum(known):.4f} USD" + ", as far as known" * (len(known) < len(costs)))
    for stage, values in metrics.items():
        lines += ["", f"## {stage}", ""]
        if isinstance(values, dict):
            shown = _shown(cast("dict[str, Any]", values))
            lines += [f"- {key}: {one_line(value)}" for key, value in shown if key not in LONG]
        else:
            lines.append(f"- {one_line(str(values))}")
    return visible("\n".join(lines) + "\n")


def champion_name(run: Cycle) -> str | None:
    """Return the name of the champion; `None` if upstream answers."""
    champion = run.store.ledger.champion()
    return champion.name if champion is not None else None


def why_none_serves(store: "Store") -> str:
    """Return why a project without a champion has none, and what to do."""
    if (leader := store.ledger.leader()) is not None:
        does = "learns" if leader.state == "learner" else "is tested"
        return f"{leader.name} {does}, upstream answers"
    if not store.ledger.champions():
        known = store.ledger.policies()
        if known and all(policy.state in ("rejected", "retired") for policy in known):
            why = "upstream answers, and no policy learns, since the last one was rejected"
            return f"{why}; `art-patch promote` lets another one serve, and `art-patch serve --name NEW` begins anew"
        return "no policy serves yet; start `art-patch serve --base MODEL`"
    why = "upstream answers since the champion was retired; `art-patch history` says why"
    return f"{why}, and `art-patch promote` lets a policy serve again"


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """Return metrics as one line of text: nested metrics in brackets, empty ones left out."""
    return ", ".join(f"{key} {value}" for key, value in _shown(metrics))


def _shown(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in metrics.items():
        if isinstance(value, dict) and value:
            yield key, f"({metrics_line(cast('dict[str, Any]', value))})"
        elif value is not None and value != {}:
            yield key, f"{value:.4g}" if isinstance(value, float) else str(value)


def _without_text(metrics: JSON) -> dict[str, Any]:
    return {
        key: _without_text(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        for key, value in metrics.items()
        if key not in _WITH_TEXT
    }
