"""Scores that people gave elsewhere: rows made by the tools' own models, read, written once, and none of ours twice."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langfuse.api import BooleanScoreV3, CategoricalScoreV3, NumericScoreV3
from langsmith.schemas import Feedback as LangSmithFeedback
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.errors import ConfigError, MalformedFile
from art_patch.feedback import read_feedback
from art_patch.store import open_store
from art_patch.trackers import trace_id_of
from art_patch.types import Score, TrajectoryInfo

RUN = "0196d2f0a1b27c3d8e4f5a6b7c8d9e0f"
DASHED = "0196d2f0-a1b2-7c3d-8e4f-5a6b7c8d9e0f"
AT = datetime(2026, 11, 20, 12, tzinfo=UTC)
OWN = Score("own", RUN, "ruler", 0.5, "ruler", 110.0)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    store = open_store(f"sqlite:///{tmp_path}/shop/store.db")
    store.write([TrajectoryInfo(RUN, 100.0), TrajectoryInfo("mine", 100.0), OWN])
    store.close()
    return tmp_path


def brought(home: Path, text: str, *options: str) -> dict[str, Any]:
    (home / "scores").write_text(text)
    words = ["feedback", "import", str(home / "scores"), "--project", "shop", "--home", str(home), "--json", *options]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    metrics = json.loads(result.stdout)
    return {name: count for name, count in metrics.items() if count and name != "path"}


def scores(home: Path, key: str) -> tuple[Score, ...]:
    store = open_store(f"sqlite:///{home}/shop/store.db")
    (found,) = store.read.trajectories([key])
    store.close()
    return found.scores


def langfuse(kind: Any, key: str, trace: str, value: Any, **more: Any) -> dict[str, Any]:
    about = {
        "id": key, "project_id": "p", "name": "thumbs", "source": "ANNOTATION", "timestamp": AT, "created_at": AT,
        "updated_at": AT, "environment": "default", "value": value, "subject": {"kind": "trace", "id": trace},
    }  # fmt: skip
    return json.loads(kind(**(about | more)).json())


def test_langfuses_scores_become_scores_once(home: Path):
    rows = [
        langfuse(NumericScoreV3, "a", RUN, 0.75, comment="nice"),
        langfuse(BooleanScoreV3, "b", trace_id_of("mine"), True, source="EVAL"),
        langfuse(CategoricalScoreV3, "c", RUN, "fine"),
        langfuse(NumericScoreV3, "d", "f" * 32, 1.0),
        langfuse(NumericScoreV3, "own", RUN, 0.5),
    ]
    text = json.dumps({"data": rows, "meta": {}})
    assert brought(home, text) == {"read": 5, "written": 2, "no_number": 1, "unknown_run": 1, "ours": 1}
    mine = Score("langfuse:a", RUN, "thumbs", 0.75, "user", AT.timestamp(), comment="nice")
    assert scores(home, RUN) == (OWN, mine)
    assert scores(home, "mine") == (Score("langfuse:b", "mine", "thumbs", 1.0, "code", AT.timestamp()),)
    assert brought(home, text) == {"read": 5, "already_there": 2, "no_number": 1, "unknown_run": 1, "ours": 1}
    changed = json.dumps(langfuse(NumericScoreV3, "a", RUN, 0.0, comment="no")) + "\n"
    assert brought(home, changed) == {"read": 1, "written": 1}
    assert scores(home, RUN)[1].value == 0.0


def test_langsmiths_feedback_as_csv_becomes_the_reward(home: Path):
    given: Any = LangSmithFeedback(
        id=DASHED, created_at=AT, modified_at=AT, run_id=DASHED, trace_id=DASHED, key="user_score", score=True,
        comment="good",
    )  # fmt: skip
    rows = [given.model_dump(mode="json")]
    with (home / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    text = (home / "rows.csv").read_text()
    assert brought(home, text, "--as", "reward") == {"read": 1, "written": 1}
    whole = Score(f"langsmith:{DASHED}", RUN, "reward", 1.0, "user", AT.timestamp(), comment="good")
    assert scores(home, RUN) == (OWN, whole)
    assert brought(home, text, "--as", "reward") == {"read": 1, "already_there": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"id": "a", "name": "x", "value": 1}]', "row 1 lacks one of"),
        ('[{"id": "a", "name": "x", "traceId": "t"}, 7]', "row 2 is no object"),
        ('{"id": "a"}\n{"id"\n', "line 2 is no JSON"),
        ("id,name,traceId,value,timestamp\na,x,t,1,yesterday\n", "'yesterday' is no time"),
    ],
)
def test_a_wrong_row_is_named_and_nothing_is_imported(home: Path, text: str, words: str):
    with pytest.raises(MalformedFile, match=words):
        brought(home, text)
    assert scores(home, RUN) == (OWN,)


def test_a_file_that_is_not_there_is_named(home: Path):
    words = ["feedback", "import", str(home / "none"), "--project", "shop", "--home", str(home)]
    assert isinstance(CliRunner().invoke(app, words).exception, ConfigError)


@given(st.text(max_size=200))
def test_any_text_is_rows_or_a_clear_error(text: str):
    try:
        read_feedback(text)
    except MalformedFile as error:
        assert "nothing was imported" in str(error)
