"""The alerts and the dashboard that the docs offer: each expression is PromQL about metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from art_patch.metrics import CATALOGUE
from tests.support.docs_pages import ROOT

FOLDER = ROOT / "docs/pages/how-to/monitoring"
ALERTS: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yml").read_text())
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
CASES = Path(__file__).with_name("alert_cases.yml")

ALWAYS = {"project", "instance", "le"}
LABELS = {name: {*ALWAYS, *metric.labels} for metric in CATALOGUE.values() for name in metric.exposed}
"""Sample -> the labels that it has, those of Prometheus itself included."""


def check(expression: str) -> None:
    """It parses, and all names and labels in it are ours."""
    promql_parser.parse(expression)
    names = set(re.findall(r"\bart_patch_\w+", expression))
    assert names <= LABELS.keys(), names - LABELS.keys()
    known = set.union(*(LABELS[name] for name in names))
    used = {label.strip() for part in re.findall(r"\bby \(([^)]*)\)", expression) for label in part.split(",")}
    used |= set(re.findall(r"(\w+)\s*[=!]~?\s*\"", expression))
    assert used <= known, used - known


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_asks_for_what_there_is(rule: dict[str, Any]):
    check(rule["expr"])
    assert set(rule["annotations"]) == {"summary", "description"}
    assert rule["labels"]["severity"] in ("page", "ticket")


def test_a_wrong_name_is_noticed():
    wrongs = ("art_patch_calls > 1", 'art_patch_mode{a="x"}', "sum by (state) (art_patch_store_up)", "rate(art_patch")
    for wrong in wrongs:
        with pytest.raises((AssertionError, ValueError)):
            check(wrong)


def test_every_alert_fires_when_it_should(tmp_path: Path):
    """By Prometheus' own tool, where it is installed."""
    cases = yaml.safe_load(CASES.read_text())
    tried = {each["alertname"] for test in cases["tests"] for each in test["alert_rule_test"]}
    assert tried == {rule["alert"] for rule in RULES}
    if (checker := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed")
    subprocess.run([checker, "check", "rules", str(FOLDER / "alerts.yml")], check=True)
    # Its cases would have to repeat all words of the annotations.
    for rule in RULES:
        assert rule.pop("annotations")
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(ALERTS))
    (tmp_path / "cases.yml").write_text(CASES.read_text())
    subprocess.run([checker, "test", "rules", "cases.yml"], cwd=tmp_path, check=True)


def test_the_dashboard():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        assert (panel["type"] == "row") == ("targets" not in panel)
        assert len({target["refId"] for target in panel.get("targets", ())}) == len(panel.get("targets", ()))
        for target in panel.get("targets", ()):
            assert 'project=~"$project"' in target["expr"]
            check(target["expr"].replace("$__rate_interval", "5m"))
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "project"}
    assert variables["project"]["definition"] == "label_values(art_patch_info, project)"
    assert "art_patch_info" in LABELS
