"""The result of a cycle, and its report on disk: `cycles/TIME-ID.json` for programs, and a `.md` file for people.

Reports are files beside the store, so that they can be read when the store cannot be opened. They contain metrics and
no text of any run.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from art_patch._lib.atomic_files import replacing
from art_patch._lib.ids import new_id
from art_patch._lib.visible_text import one_line, visible
from art_patch.types import JSON

Outcome = Literal[
    "promoted", "rejected", "nothing to do", "out of time", "not idle", "waits for approval", "canary", "failed"
]

LONG = ("history", "corrections_upto", "checks", "config", "data_sha256", "job")
"""Names of metrics that are too long for people; only the store and `--json` show them."""
KEPT = 200
"""Number of reports that are kept; older ones are deleted."""
_WITH_TEXT = ("round_trips",)  # metrics that quote recorded words; the erasure of a user does not look into reports


@dataclass(frozen=True, slots=True)
class CycleReport:
    """The result of a cycle.

    Attributes:
        outcome: how the cycle ended. `canary`: a policy is now under test on the app's traffic. `waits for approval`:
            the candidate won, and a person decides. `out of time`, `not idle`: the remaining steps are left to the next
            cycle. `failed` appears in report files only, because the cycle raised an error instead of returning.
    """

    outcome: Outcome
    reason: str
    champion: str | None  # which serves when the cycle ends
    candidate: str | None = None  # which this cycle trained or tested, if any
    metrics: JSON = field(default_factory=dict[str, Any])  # of every step that ran, by the step's name


def write_report(report: CycleReport, directory: Path, *, who: str, began_at: float, took_s: float) -> Path | None:
    """Write the report to the project's directory as JSON and Markdown; delete reports beyond the newest `KEPT`.

    Returns the JSON file's path, or `None` if it could not be written, which does not fail the cycle.
    """
    folder = directory / "cycles"
    # The time sorts the files; the end of an id keeps two cycles of one second apart.
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(began_at))}-{new_id()[-8:]}"
    facts: dict[str, Any] = asdict(report) | {"began_at": began_at, "took_s": round(took_s, 3), "who": who}
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


def to_markdown(facts: JSON) -> str:
    """Return the content of a report's JSON file as Markdown for people."""
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts["began_at"]))
    metrics: dict[str, Any] = dict(facts["metrics"])
    costs = [values["cost_usd"] for values in metrics.values() if isinstance(values, dict) and "cost_usd" in values]
    lines = [
        f"# {facts['outcome']}" + (f": {facts['candidate']}" if facts["candidate"] else ""),
        "",
        # One line, because a reason may quote an error message with line breaks or Markdown's headings.
        one_line(str(facts["reason"])),
        "",
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


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """Return metrics as one line of text: nested metrics in brackets, empty ones left out."""
    return ", ".join(f"{key} {value}" for key, value in _shown(metrics))


def _shown(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each metric that has a value."""
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
