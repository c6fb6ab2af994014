"""`art-patch config`: every setting, its value and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

from art_patch.settings import Settings
from art_patch.store import open_store
from tests.support.command_line import art_patch


def test_every_setting_has_its_origin_and_no_secret_is_shown(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/shop/store.db")
    store.ledger.set_mode("record", who="ada")
    store.close()
    (tmp_path / "env").write_text("ART_PATCH_GATE_SCENARIOS=7\n")
    command = ("--env-file", str(tmp_path / "env"), "config", "--project", "shop")
    given = {"ART_PATCH_JUDGE": "openai/x", "ART_PATCH_JUDGE_API_KEY": "s3cret", "ART_PATCH_MODE": "route"}
    given["ART_PATCH_IMITATE_MODELS"] = "gpt-5-mini, gpt-5"
    told = json.loads(art_patch(*command, "--json", home=tmp_path, **given).stdout)
    settings = told["settings"]
    assert set(settings) == set(Settings.model_fields)
    expected = {
        "project": ("shop", "argument"), "judge": ("openai/x", "environment"), "gate_scenarios": (7, "env file"),
        "judge_api_key": ("set, not shown", "environment"), "mode": ("record", "store"),
        "sample_rate": (1.0, "default"), "imitate_models": ("gpt-5-mini,gpt-5", "environment"),
        "checks": (None, "default"),
    }  # fmt: skip
    assert {name: (settings[name]["value"], settings[name]["source"]) for name in expected} == expected
    shown = art_patch(*command, home=tmp_path, COLUMNS="80", **given).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert all(name in shown for name in Settings.model_fields)
    assert "s3cret" not in shown


def test_it_is_shown_without_a_store_too(tmp_path: Path):
    result = art_patch("config", "--json", home=tmp_path)
    assert result.returncode == 0
    assert json.loads(result.stdout)["store_unread"]
    assert "what the store sets is not known" in art_patch("config", home=tmp_path).stdout
