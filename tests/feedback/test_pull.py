"""Scores that people gave elsewhere, asked for there: the tools' real clients against stand-ins of their servers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from langfuse.api import BooleanScoreV3, CategoricalScoreV3, NumericScoreV3
from langsmith.schemas import Feedback as LangSmithFeedback
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.errors import ConfigError, TrackerError
from art_patch.store import open_store
from art_patch.trackers import trace_id_of
from art_patch.types import Score, TrajectoryInfo
from tests.feedback.feedback_servers import PROJECT, FeedbackServer, serving_feedback

RUN = "0196d2f0a1b27c3d8e4f5a6b7c8d9e0f"
DASHED = "0196d2f0-a1b2-7c3d-8e4f-5a6b7c8d9e0f"
OTHER = "22222222-0000-4000-8000-000000000000"
AT = datetime(2026, 11, 20, 12, tzinfo=UTC)
OWN = Score("own", RUN, "ruler", 0.5, "ruler", 110.0)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    store = open_store(f"sqlite:///{tmp_path}/shop/store.db")
    store.write([TrajectoryInfo(RUN, 100.0), TrajectoryInfo("mine", 100.0), OWN])
    store.close()
    return tmp_path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FeedbackServer]:
    with serving_feedback() as told:
        monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk")
        monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk")
        monkeypatch.setenv("LANGFUSE_BASE_URL", told.address)
        monkeypatch.setenv("LANGSMITH_API_KEY", "key")
        monkeypatch.setenv("LANGSMITH_ENDPOINT", told.address)
        monkeypatch.delenv("LANGSMITH_PROJECT", raising=False)
        yield told


def pulled(home: Path, *words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*words, "--project", "shop", "--home", str(home), "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return {name: count for name, count in json.loads(result.stdout).items() if count}


def scores(home: Path, key: str) -> tuple[Score, ...]:
    store = open_store(f"sqlite:///{home}/shop/store.db")
    (found,) = store.read.trajectories([key])
    store.close()
    return found.scores


def langfuse(model: Any, key: str, subject: dict[str, str], value: Any, **more: Any) -> dict[str, Any]:
    kind = model.__name__.removesuffix("ScoreV3").upper()
    about = {
        "id": key, "project_id": "p", "name": "thumbs", "source": "ANNOTATION", "timestamp": AT, "created_at": AT,
        "updated_at": AT, "environment": "default", "value": value, "subject": subject,
    }  # fmt: skip
    return json.loads(model(**(about | more)).json()) | {"dataType": kind}


def test_langfuses_scores_become_scores_and_a_second_time_adds_nothing(home: Path, server: FeedbackServer):
    run = {"kind": "trace", "id": RUN}
    server.scores = [
        langfuse(NumericScoreV3, "a", run, 0.75, comment="nice"),
        langfuse(BooleanScoreV3, "b", {"kind": "trace", "id": trace_id_of("mine")}, True, source="EVAL"),
        langfuse(NumericScoreV3, "c", {"kind": "observation", "id": "f" * 16, "traceId": RUN}, 1.0),
        langfuse(CategoricalScoreV3, "d", run, "1"),
        langfuse(NumericScoreV3, "own", run, 0.5),
        langfuse(NumericScoreV3, "e", {"kind": "session", "id": "s1"}, 1.0),
    ]
    source = f"langfuse {server.address} pk"
    first = pulled(home, "feedback", "pull", "langfuse")
    rest = {"ours": 1, "no_number": 1, "unknown_run": 1}
    assert first == {"source": source, "read": 6, "written": 3} | rest
    whole = (
        Score("langfuse:a", RUN, "thumbs", 0.75, "user", AT.timestamp(), comment="nice"),
        Score("langfuse:c", RUN, "thumbs", 1.0, "user", AT.timestamp()),
    )
    assert scores(home, RUN) == (OWN, *whole)
    assert scores(home, "mine") == (Score("langfuse:b", "mine", "thumbs", 1.0, "code", AT.timestamp()),)
    assert [query.get("cursor") for _, query in server.asked] == [None, "2", "4"]
    assert {headers["authorization"] for headers in server.headers} == {f"Basic {base64.b64encode(b'pk:sk').decode()}"}
    assert pulled(home, "feedback", "pull", "langfuse") == {"source": source, "read": 6, "already_there": 3} | rest
    server.scores[0] |= {"value": 0.0, "comment": None}
    changed = pulled(home, "feedback", "pull", "langfuse")
    assert changed == {"source": source, "read": 6, "written": 1, "already_there": 2} | rest
    assert scores(home, RUN)[1].value == 0.0


def feedback(key: str, score: Any, **more: Any) -> dict[str, Any]:
    about = {
        "id": key, "created_at": AT, "modified_at": AT, "run_id": DASHED, "trace_id": DASHED, "key": "user_score",
        "score": score, "session_id": PROJECT,
    }  # fmt: skip
    return LangSmithFeedback(**(about | more)).model_dump(mode="json")


def test_langsmiths_feedback_becomes_the_reward(home: Path, server: FeedbackServer):
    early, one, two = (f"{number:08}-0000-4000-8000-000000000000" for number in range(3))
    server.feedback = [
        feedback(early, 0.25, created_at=AT - timedelta(days=9)),
        feedback(one, True, comment="good", run_id=OTHER),
        feedback(two, 0.5, session_id=OTHER, feedback_source={"type": "model"}),
    ]
    words = ("import", "scores", "langsmith", "--as", "reward", "--since", "2026-11-19")
    source = f"langsmith {server.address}"
    assert pulled(home, *words, "--langsmith-project", "shop") == {"source": f"{source} shop", "read": 1, "written": 1}
    good = Score(f"langsmith:{one}", RUN, "reward", 1.0, "user", AT.timestamp(), comment="good")
    assert scores(home, RUN) == (OWN, good)
    assert pulled(home, *words) == {"source": source, "read": 2, "written": 1, "already_there": 1}
    by_model = Score(f"langsmith:{two}", RUN, "reward", 0.5, "code", AT.timestamp())
    assert scores(home, RUN) == (OWN, good, by_model)
    assert pulled(home, *words) == {"source": source, "read": 2, "already_there": 2}
    assert {headers["x-api-key"] for headers in server.headers} == {"key"}


def test_a_file_of_scores_has_the_same_two_names(home: Path, server: FeedbackServer):
    file = home / "scores.json"
    file.write_text(json.dumps([langfuse(NumericScoreV3, "a", {"kind": "trace", "id": RUN}, 0.75)]))
    assert pulled(home, "import", "scores", str(file)) == {"path": str(file), "read": 1, "written": 1}
    assert pulled(home, "feedback", "import", str(file)) == {"path": str(file), "read": 1, "already_there": 1}


@pytest.mark.parametrize("tracker", ["langfuse", "langsmith"])
def test_who_refuses_is_named_with_the_keys_to_look_at(home: Path, server: FeedbackServer, tracker: str):
    server.status = 401
    with pytest.raises(TrackerError, match=rf"^{tracker} http.*401.*{tracker.upper()}_\w+"):
        pulled(home, "feedback", "pull", tracker)
    assert scores(home, RUN) == (OWN,)


def test_a_project_that_langsmith_does_not_have(home: Path, server: FeedbackServer):
    with pytest.raises(TrackerError, match=r"Project other not found.*LANGSMITH_PROJECT"):
        pulled(home, "feedback", "pull", "langsmith", "--langsmith-project", "other")


def test_without_a_key_it_says_where_one_is(home: Path, server: FeedbackServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LANGSMITH_API_KEY")
    with pytest.raises(ConfigError, match="set LANGSMITH_API_KEY"):
        pulled(home, "feedback", "pull", "langsmith")
