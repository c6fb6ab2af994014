"""`art-patch evaluate` over a real engine and real RULER; only the judge's opinion is a rule."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from art_patch._lib.key_files import made_key
from art_patch.cli.app import app
from art_patch.cli.commands.measure import evaluate, say_comparison
from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge
from art_patch.errors import EngineError
from art_patch.pipeline import Run, group
from art_patch.pipeline.cycle_run import CycleConfig
from art_patch.policies import base_fingerprint
from art_patch.rewards import Judge
from art_patch.serving import EmbeddedEngine
from art_patch.store import open_store
from art_patch.types import Policy
from tests.support.cycles import QUESTIONS, Place, is_foreign
from tests.support.engines import Running, serve
from tests.support.tiny import make_tiny_adapter


@pytest.fixture
def running(tmp_path: Path, base: Path) -> Iterator[Running]:
    """An engine, traffic whose scenarios are held out, and a candidate that is not loaded."""
    project = tmp_path / "default"
    adapter = make_tiny_adapter(project / "adapters", base, "agent", 1)
    engine = EmbeddedEngine.from_pretrained(base, adapters_root=project / "adapters")
    with serve(engine, admin_key=made_key(project / "admin.key")) as served:
        place = Place(project, base, served.client)
        place.traffic(siblings=2, questions=QUESTIONS[:8])
        config = CycleConfig(settle_s=0.0, holdout_share=0.99, min_group_size=2)
        group(Run(place.store, Judge("openai/none"), config, lambda *_: None, 100.0))
        policy = Policy("agent@1", str(base), base_fingerprint(base), "candidate", time.time(), str(adapter), "agent@0")
        place.store.ledger.add_candidate(policy, trained_on=[], who="test")
        place.store.ledger.set_engine(f"{served.url}/v1", who="test")
        place.store.close()
        yield served


def test_it_says_who_is_better_and_leaves_all_as_it_was(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ART_PATCH_GATE_SCENARIOS", "8")
    with serve_stand_in_judge(is_foreign) as judge:
        asked = ["evaluate", "agent@1", "--home", str(tmp_path), "--judge", STAND_IN_MODEL, "--judge-base-url", judge]
        result = CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    metrics = found["metrics"]
    assert (result.exit_code, found["policy"], found["against"]) == (0, "agent@1", "agent@0")
    assert (metrics["judge"], metrics["scenarios"], metrics["unscored"]) == (STAND_IN_MODEL, 8, 0)
    assert found["better"] == (metrics["lower_bound"] > 0 and all(row["passed"] for row in metrics["checks"]))
    say_comparison(found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("agent@1 is ") and lines[0].endswith(" better than agent@0")
    rows = lines[next(index for index, line in enumerate(lines) if line.startswith("  held-out")) :]
    assert lines[1].startswith("  scores ") and max(map(len, lines[: -len(rows)])) <= 80
    assert [line.split()[0] for line in rows[:5]] == ["held-out", "agent@1", "agent@0", "difference", "at"]
    assert len([line for line in lines if line.startswith(("  passed", "  FAILED"))]) == len(metrics["checks"])
    assert lines[-1] == "nobody was promoted or rejected"
    assert running.client.models() == ["agent@0"]
    with closing(open_store(f"sqlite:///{tmp_path}/default/store.db")) as store:
        states = {policy.name: policy.state for policy in store.ledger.policies()}
        assert (states, store.verify()) == ({"agent@0": "champion", "agent@1": "candidate"}, [])
        assert store.ledger.history(limit=9)[0]["policy"] == "agent@1"  # that it was added is the last that was decided
        store.ledger.set_engine(None, who="test")
    with pytest.raises(EngineError, match="art-patch serve"):
        evaluate("agent@1", home=tmp_path, judge=STAND_IN_MODEL)
