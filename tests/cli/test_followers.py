"""`--wait`: a command that changes the route waits until the apps follow it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Timer

import pytest

from art_patch.cli import followers
from art_patch.settings import load_settings
from art_patch.store import open_store
from art_patch.types import AppReport
from tests.support.command_line import ENVIRONMENT, art_patch
from tests.support.proxies import until
from tests.support.servers import serving

APP = """
import sys
import openai
import art_patch as art

art.patch()
client = openai.OpenAI(api_key="k", base_url=sys.argv[1], max_retries=0)
client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "hello"}])
print("called", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    open_store(f"sqlite:///{tmp_path}/default/store.db").close()
    return tmp_path


@pytest.fixture
def app(home: Path) -> Iterator[subprocess.Popen[str]]:
    environment = ENVIRONMENT | {"ART_PATCH_HOME": str(home)}
    with serving() as upstream, subprocess.Popen(
        [sys.executable, "-c", APP, upstream.url],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "called\n"
        yield process
        process.kill()


def test_one_waits_until_the_apps_have_followed(home: Path, app: subprocess.Popen[str]):
    with closing(open_store(f"sqlite:///{home}/default/store.db")) as store:
        reports = until(lambda: store.read.apps(since=0.0))
    (report,) = reports
    assert report.id.endswith(f":{app.pid}")
    for mode in ("record", "off", "shadow"):
        told = json.loads(art_patch("mode", mode, "--wait", "--json", home=home).stdout)
        assert (told["mode"], told["apps"], told["followed"], told["not_followed"]) == (mode, 1, [report.id], [])
    for percent, control in (("20", "1"), ("40", "0")):
        told = art_patch("mode", "canary", "--percent", percent, "--control", control, "--wait", "--json", home=home)
        assert json.loads(told.stdout)["followed"] == [report.id]
        with closing(open_store(f"sqlite:///{home}/default/store.db")) as store:
            (newest,) = store.read.apps(since=0.0)
        shares = (newest.facts["canary_percent"], newest.facts["control_percent"])
        assert shares == (float(percent), float(control)), "the shares are followed too, not the mode alone"
    shown = art_patch("mode", "off", "--wait", home=home)
    assert (shown.returncode, shown.stdout) == (0, "mode of default: off; 1 of 1 app process follows\n")


def test_who_does_not_follow_is_named(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(followers, "WAIT_S", 0.5)
    settings = load_settings(home=home)
    with closing(open_store(settings.store_url)) as store:
        now = time.time()
        store.write([
            AppReport("web:1", now, {"mode": "record", "champion": None, "challenger": None}),
            AppReport("web:2", now, {"mode": "route", "champion": None, "challenger": None}),
            AppReport("web:3", now - 2 * followers.SEEN_S, {"mode": "route"}),
        ])  # fmt: skip
        store.ledger.set_mode("record", who="test")
        found = followers.followed(store, settings, wait=followers.Wait(True), dry=followers.DryRun())
    assert (found.follow, found.others) == (("web:1",), ("web:2",))
    assert found.words() == "1 of 2 app processes follow; not yet, or gone: web:2"
    assert found.facts() == {"apps": 2, "dry_run": False, "followed": ["web:1"], "not_followed": ["web:2"]}
    with closing(open_store(settings.store_url)) as store:
        store.ledger.set_mode("canary", canary_percent=20, who="test")
        store.ledger.set_control_group(5, who="test")
        same = {"mode": "canary", "champion": None, "challenger": None, "challenger_state": None}
        store.write([
            AppReport("web:1", now, same | {"canary_percent": 20.0, "control_percent": 5.0}),
            AppReport("web:2", now, same | {"canary_percent": 5.0, "control_percent": 5.0}),
            AppReport("web:4", now, same | {"canary_percent": 20.0, "control_percent": 0.0}),
            AppReport("web:5", now, same),  # of a release that does not tell its shares
        ])  # fmt: skip
        later = followers.followed(store, settings, wait=followers.Wait(True), dry=followers.DryRun())
    assert (later.follow, later.others) == (("web:1", "web:5"), ("web:2", "web:4"))
    with pytest.raises(followers.typer.Exit) as ended:
        found.end()
    assert ended.value.exit_code == 1


def test_an_app_whose_clock_is_slow_counts_once_it_reports(home: Path):
    settings, slow_s = load_settings(home=home), 10 * followers.SEEN_S
    facts = {"mode": "route", "champion": None, "challenger": None}
    with closing(open_store(settings.store_url)) as store:
        now = time.time() - slow_s
        store.write([AppReport("slow:1", now, facts), AppReport("ended:1", now, facts)])
        store.ledger.set_mode("record", who="test")

        def report() -> None:
            with closing(open_store(settings.store_url)) as own:
                own.write([AppReport("slow:1", now + 1.0, facts | {"mode": "record"})])

        thread = Timer(0.5, report)
        thread.start()
        found = followers.followed(store, settings, wait=followers.Wait(True), dry=followers.DryRun())
        thread.join()
        assert (found.follow, found.others) == (("slow:1",), ())
        found = followers.followed(store, settings, wait=followers.Wait(False), dry=followers.DryRun())
        assert (found.follow, found.others) == ((), ())
