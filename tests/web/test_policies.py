"""The pages of policies: the family, one policy's story, gate and test, and decisions with a reason and a name."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_patch._lib.ids import new_id
from art_patch.policies import base_fingerprint
from art_patch.serving import EmbeddedEngine
from art_patch.settings import Settings, load_settings
from art_patch.store import GateTurn, Store, open_store
from art_patch.types import Call, Choice, Group, Policy, Score, TrajectoryInfo
from tests.support.engines import ADMIN_KEY, serve
from tests.support.tiny import make_tiny_adapter
from tests.support.web import Served, csrf_of, served

EVIL = "</p><script>alert(1)</script>"
GATE: dict[str, Any] = {
    "scenarios": 21, "candidate": 0.5, "champion": 0.6, "difference": -0.1, "lower_bound": -0.2, "judge": EVIL,
    "gains": [
        {"name": "the judge", "mean": -0.1, "low": -0.25, "high": 0.02, "count": 21, "unit": "scenarios"},
        {"name": "your rewards", "mean": 0.1, "low": -0.05, "high": 0.2, "count": 9, "unit": "scenarios"},
    ],
    "checks": [{"name": "cut off", "passed": False, "words": "cut off 0.4 against 0: at most 0.1 is allowed"}],
    "ruined": [EVIL],
    "results": [
        {"group": "group-1", "candidate": 0.1, "champion": 0.9},
        {"group": "gone", "candidate": 0.5, "champion": 0.5},
        {"group": "erased", "candidate": 0.75, "champion": 0.25},
    ],
    "config": {"margin": 0.0},
}  # fmt: skip
WHY = f"scores 0.500 against 0.600 on 21 held-out scenarios; not proven better; besides, {EVIL}"


def session(number: int, policy: str, at: float, said: str, reward: float | None) -> list[Any]:
    key = f"run-{number}"
    call = Call(
        new_id(), key, at, "m", ({"role": "user", "content": f"how many? {EVIL}"},),
        (Choice(0, {"role": "assistant", "content": said}, "stop"),), policy=policy, duration_ms=10.0,
        completion_tokens=4,
    )  # fmt: skip
    scores = [] if reward is None else [Score(new_id(), key, "reward", reward, "code", at + 1)]
    return [TrajectoryInfo(key, at, session_id=f"visit-{number}"), call, *scores]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[tuple[Settings, Store]]:
    """`agent@0` serves, the gate rejected `agent@1`, and `agent@2` answers a fifth of the sessions since an hour."""
    settings = load_settings(home=tmp_path, project="bot")
    settings.directory.mkdir(parents=True)
    store = open_store(settings.store_url, project="bot")
    ledger, now = store.ledger, time.time()
    ledger.add_base("agent@0", "base", "0" * 64, who="ada", now=now - 9_000)
    for step in (1, 2, 3):
        made = Policy(f"agent@{step}", "base", "0" * 64, "candidate", now - 8_000 + step, "/nowhere", "agent@0")
        ledger.add_candidate(made, trained_on=[], who="ada")
    ledger.move("agent@1", "rejected", who="ada", reason=WHY, metrics={"gate": GATE}, now=now - 7_000)
    ledger.move("agent@2", "canary", percent=20.0, who="ada", reason="try it", now=now - 3_600)
    rng, records = random.Random(1), list[Any]()
    for number in range(60):
        policy = "agent@2" if rng.random() < 0.2 else "agent@0"
        good = rng.random() < (0.9 if policy == "agent@2" else 0.5)
        records += session(number, policy, now - 3_500 + 30 * number, policy, float(good))
    store.write(records)
    held_out = [run for run in store.read.trajectories(["run-0"])]
    ledger.add_groups([Group("group-1", "task:1", "single", tuple(held_out), held_out=True)])
    yield settings, store
    store.close()


@pytest.fixture
def server(project: tuple[Settings, Store]) -> Iterator[Served]:
    with served(project[0]) as running:
        yield running


def json_of(server: Served, path: str) -> Any:
    with server.client() as client:
        answer = client.get(f"/api/v1/bot/{path}", headers={"authorization": f"Bearer {server.key('bot')}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def decided(client: httpx.Client, query: str, **form: str) -> httpx.Response:
    """Send the form of a decision's page, as a browser does."""
    page = client.get(f"/p/bot/decide?{query}")
    assert page.status_code == 200, page.text
    form = {"csrf": csrf_of(page), "who": "ada", "reason": ""} | form
    form |= dict(re.findall(r'name="(what|policy|to|percent)" value="([^"]*)"', page.text))
    return client.post("/p/bot/decide", data=form)


def test_the_family_has_states_shares_and_gates(server: Served):
    facts = json_of(server, "policies")
    shown = [
        (each["name"], each["state"], each["parent"], each["percent"], each["depth"]) for each in facts["policies"]
    ]
    assert shown == [
        ("agent@3", "candidate", "agent@0", None, 0),
        ("agent@2", "canary", "agent@0", 20.0, 1),
        ("agent@1", "rejected", "agent@0", None, 1),
        ("agent@0", "champion", None, 80.0, 0),
    ]
    gate = facts["policies"][2]["gate"]
    assert (gate["difference"], gate["bound"], gate["low"], gate["high"], gate["proven"]) == (
        -0.1, -0.2, -0.25, 0.02, False,
    )  # fmt: skip
    assert (facts["scale"], facts["champion"]) == (0.25, "agent@0")
    assert facts["tested"] == {"policy": "agent@2", "state": "canary", "percent": 20.0}


def test_why_a_candidate_was_rejected_is_one_click_from_the_first_page(server: Served):
    with server.entered() as client:
        assert '<a href="/p/bot/policies/agent%401">agent@1</a>' in client.get("/p/bot/").text
        page = client.get("/p/bot/policies/agent%401").text
    told = page.partition("Why it is rejected")[2].partition("</section>")[0]
    assert "scores 0.500 against 0.600 on 21 held-out scenarios" in told
    assert "<li>not proven better</li>" in told
    assert "by ada" in told
    assert "Not proven better than the policy that it was tested against" in page
    assert "cut off 0.4 against 0" in page
    assert page.count('class="interval') == 3
    assert "The release that ran this gate did not keep the answers." in page
    assert "<summary>Both answers</summary>" not in page
    (prompts,) = json_of(server, "policies/agent@1")["prompts"].values()
    assert (prompts["answers_kept"], prompts["lost"][0]["turns"]) == (False, [])
    assert prompts["counts"] == {"lost": 1, "won": 1, "even": 1}
    assert [(each["group"], each["run"]) for each in prompts["lost"]] == [("group-1", "run-0")]
    assert prompts["lost"][0]["opening"].startswith("how many?")
    assert [(each["group"], each["run"]) for each in prompts["won"]] == [("erased", None)]
    assert "1 won, 1 lost, 1 even." in page
    assert "erased since" in page


def answered(*texts: str) -> tuple[dict[str, Any], ...]:
    """Answers, each with a better score than the one before."""
    return tuple(
        {"message": {"role": "assistant", "content": text}, "finish_reason": "length", "score": 0.1 * number}
        for number, text in enumerate(texts)
    )


def test_a_lost_prompt_shows_both_answers_until_its_run_is_erased(server: Served, project: tuple[Settings, Store]):
    store, calls = project[1], {run.id: run.calls[0].id for run in project[1].read.trajectories(["run-0", "run-1"])}
    long = "word " * 5_000
    for against, key, said in (("agent@0", "gate", "Five plums cost 15."), ("upstream", "upstream_gate", long)):
        ours = answered("no", f"Five plums {EVIL} cost 12.", "yes")
        turn = GateTurn(calls["run-0"], "run-0", "group-1", ours, answered(said))
        store.gate_answers.keep("agent@3", against, [turn])
        store.ledger.keep_metrics("agent@3", metrics={key: GATE | {"against": against}})
    facts = json_of(server, "policies/agent@3")["prompts"]
    assert [(name, its["against"]) for name, its in facts.items()] == [
        ("gate", "agent@0"),
        ("upstream_gate", "upstream"),
    ]
    ((turn,),) = [each["turns"] for each in facts["gate"]["lost"]]
    assert (turn["run"], turn["call"]) == ("run-0", calls["run-0"])
    assert turn["answers"] == [
        {"of": 3, "score": 0.1, "finish_reason": "length"},
        {"of": 1, "score": 0.0, "finish_reason": "length"},
    ]
    (pair,) = turn["compared"]["pairs"]
    assert pair["left"]["pieces"] == [["same", "Five plums "], ["only", f"{EVIL} "], ["same", "cost "], ["only", "12."]]
    assert facts["gate"]["won"][0]["turns"] == []
    assert facts["upstream_gate"]["lost"][0]["turns"][0]["compared"]["pairs"][0]["right"]["cut"] > 10_000
    with server.entered() as client:
        page = client.get("/p/bot/policies/agent@3").text
        assert EVIL not in page
        assert page.count("<summary>Both answers</summary>") == 2
        assert "agent@3, score 0.10, 1 of 3 answers, ended by length" in page
        assert "<mark>15.</mark>" in page
        assert "more characters" in page
        assert "Its answers are not there: the run was erased, or is older than what is kept." in page
        assert "proven better than agent@0" in page
        store.rights.erase(trajectory="run-0", who="ada")
        page = client.get("/p/bot/policies/agent@3").text
        assert "Both answers" not in page
        assert "plums" not in page
        assert page.count("Its answers are not there") == 4
    assert json_of(server, "policies/agent@3")["prompts"]["gate"]["lost"][0]["turns"] == []


def test_a_running_test_shows_its_evidence_over_time(server: Served):
    facts = json_of(server, "policies/agent@2")
    test = facts["test"]
    assert (test["challenger"], test["champion"], test["state"], test["percent"]) == (
        "agent@2", "agent@0", "canary", 20.0,
    )  # fmt: skip
    arms = test["metrics"]
    assert arms["challenger"]["sessions"] + arms["champion"]["sessions"] == 60
    reward = arms["signals"]["reward"]
    path = test["proofs"]["reward"]
    assert path[-1]["sessions"] == reward["compared"] + arms["champion"]["sessions"]
    assert [each["at"] for each in path] == sorted(each["at"] for each in path)
    for way in ("worse", "better"):
        shares = [each[way] for each in path]
        assert shares == sorted(shares)  # a proof stands
        assert (shares[-1] >= 1) is (reward[way] >= reward[f"{way}_needed"])
    assert path[-1]["better"] > path[-1]["worse"]
    assert test["proofs"]["latency_ms"][-1]["better"] is None
    assert "time left" in test["time_left_words"]
    with server.entered() as client:
        page = client.get("/p/bot/policies/agent@2").text
    assert "Evidence over time" in page
    assert page.count("<polyline") >= 3
    assert "of the proof that it is better" in page


def test_pages_show_hostile_words_as_words(server: Served):
    paths = [f"policies/agent@{step}" for step in range(4)]
    paths += ["policies", "policies/agent@2/answers?beside=agent@0", "decide?what=reject&policy=agent@1"]
    with server.entered() as client:
        for path in paths:
            page = client.get(f"/p/bot/{path}")
            assert page.status_code == 200, path
            assert EVIL not in page.text
            assert "style=" not in page.text
        assert client.get("/p/bot/policies/agent@9").status_code == 404
        assert client.get("/p/bot/policies/agent@9/answers").status_code == 404
        assert client.get("/p/bot/decide?what=burn").status_code == 422
        assert "there is no policy" in client.get("/p/bot/decide?what=reject&policy=agent@9").text


def test_answers_of_both_stand_side_by_side_and_erased_ones_are_gone(server: Served, project: tuple[Settings, Store]):
    def found() -> Any:
        until = time.monotonic() + 30
        while not (facts := json_of(server, "policies/agent@2/answers?beside=agent@0"))["is_read"]:
            assert time.monotonic() < until
            time.sleep(0.05)
        return facts

    facts = found()
    assert (facts["name"], facts["beside"], facts["prompts"]) == ("agent@2", "agent@0", 1)
    (pair,) = facts["pairs"]
    assert pair["prompt"] == f"how many? {EVIL}"
    assert (pair["a"]["texts"], pair["b"]["texts"]) == (["agent@2"], ["agent@0"])
    project[1].rights.erase(trajectory=pair["a"]["run"], who="ada")
    assert found()["pairs"] == []


def test_a_rejection_and_a_rollback_need_no_engine_and_are_noted(server: Served, project: tuple[Settings, Store]):
    ledger = project[1].ledger
    with server.entered() as client:
        page = client.get("/p/bot/decide?what=reject&policy=agent@3").text
        assert "agent@3 is rejected for good, was candidate" in page
        assert "Nothing is changed yet." in page
        assert ledger.policy("agent@3").state == "candidate"  # type: ignore[union-attr]
        refused = decided(client, "what=reject&policy=agent@3")
        assert (refused.status_code, "say why" in refused.text) == (409, True)
        nobody = decided(client, "what=reject&policy=agent@3", who=" ", reason="rude")
        assert (nobody.status_code, "say who you are" in nobody.text) == (409, True)
        done = decided(client, "what=reject&policy=agent@3", reason="it is  rude")
        assert done.url.path == "/p/bot/policies/agent@3"
        assert "agent@3 is rejected for good, was candidate; agent@0 serves" in done.text
        # The canary's test ends in the same way.
        asked = client.get("/p/bot/decide?what=rollback").text
        assert "agent@2 is rejected" in asked
        assert "agent@0 answers every session" in asked
        done = decided(client, "what=rollback")
        assert "agent@2 is rejected; agent@0 answers every session" in done.text
    moves = [(move["policy"], move["to_state"], move["who"], move["reason"]) for move in ledger.history(limit=2)]
    assert moves == [
        ("agent@2", "rejected", "ada (art-patch web: rollback)", "rolled back by hand"),
        ("agent@3", "rejected", "ada (art-patch web: reject)", "it is rude"),
    ]


def test_a_canarys_share_changes_without_an_engine_and_a_promotion_is_refused(
    server: Served, project: tuple[Settings, Store]
):
    ledger = project[1].ledger
    with server.entered() as client:
        page = client.get("/p/bot/decide?what=canary&policy=agent@2&percent=40").text
        assert "agent@2 answers 40 % of the sessions, agent@0 all others" in page
        assert ledger.route().challenger_percent == 20
        done = decided(client, "what=canary&policy=agent@2&percent=40", reason="looks good")
        assert "agent@2 answers 40 % of the sessions" in done.text
        assert ledger.route().challenger_percent == 40
        for query, why in (
            ("what=promote&policy=agent@2", "no engine is running"),
            ("what=canary&policy=agent@3&percent=5", "agent@2 is canary already"),
            ("what=canary&policy=agent@2", "say on which share"),
            ("what=canary&policy=agent@2&percent=0", "is no share of the sessions"),
            ("what=shadow&policy=agent@1", "agent@1 is rejected"),
            ("what=rollback&to=agent@1", "never served"),
        ):
            page = client.get(f"/p/bot/decide?{query}").text
            assert "This is refused" in page, query
            assert why in page
            assert 'method="post" action="/p/bot/decide"' not in page
        # Nor by a form that the page does not offer.
        csrf = csrf_of(client.get("/p/bot/policies"))
        form = {"csrf": csrf, "who": "ada", "what": "promote", "policy": "agent@2"}
        assert client.post("/p/bot/decide", data=form).status_code == 409
        assert client.post("/p/bot/decide", data=form | {"what": "burn"}).status_code == 409
        assert client.post("/p/bot/decide", data=form | {"csrf": "x"}).status_code == 403
    assert [policy.state for policy in ledger.policies()] == ["champion", "rejected", "canary", "candidate"]


def test_who_may_only_look_is_shown_what_would_happen(project: tuple[Settings, Store]):
    with served(project[0], role="look") as running, running.entered() as client:
        page = client.get("/p/bot/decide?what=reject&policy=agent@3")
        assert "is rejected for good" in page.text
        assert 'action="/p/bot/decide"' not in page.text
        assert "Reject</a>" not in client.get("/p/bot/policies/agent@3").text
        form = {"csrf": csrf_of(page), "who": "eve", "what": "reject", "policy": "agent@3", "reason": "no"}
        assert client.post("/p/bot/decide", data=form).status_code == 403
    assert project[1].ledger.policy("agent@3").state == "candidate"  # type: ignore[union-attr]


def test_a_policy_is_promoted_beside_a_running_engine(tmp_path: Path, base: Path):
    settings = load_settings(home=tmp_path, project="bot")
    path = make_tiny_adapter(settings.adapters, base)
    key = settings.directory / "admin.key"
    key.write_text(ADMIN_KEY)
    key.chmod(0o600)
    store = open_store(settings.store_url, project="bot")
    sha256, now = base_fingerprint(base), time.time()
    store.ledger.add_base("agent@0", str(base), sha256, who="ada")
    made = Policy("agent@1", str(base), sha256, "candidate", now, str(path), "agent@0")
    store.ledger.add_candidate(made, trained_on=[], who="ada")
    store.write([each for number in range(4) for each in session(number, "agent@0", now - 60, "hello", 0.75)])
    with (
        serve(EmbeddedEngine.from_pretrained(base, adapters_root=settings.adapters)) as engine,
        served(settings) as running,
        running.entered() as client,
    ):
        store.ledger.set_engine(engine.client.base_url, who="ada")
        page = client.get("/p/bot/decide?what=promote&policy=agent@1").text
        assert "agent@1 serves" in page
        until = time.monotonic() + 30
        while "own reward 0.75" not in page:  # read in the background
            assert time.monotonic() < until
            page = client.get("/p/bot/decide?what=promote&policy=agent@1").text
        done = decided(client, "what=promote&policy=agent@1", reason="better")
        assert "agent@1 serves" in done.text
        assert engine.client.models()[-1] == "agent@1"
    move = store.ledger.history(limit=None, policy="agent@1")[0]
    assert (move["to_state"], move["who"], move["reason"]) == ("champion", "ada (art-patch web: promote)", "better")
    store.close()


def test_a_project_without_policies_says_what_to_do(tmp_path: Path):
    settings = load_settings(home=tmp_path, project="bot")
    settings.directory.mkdir(parents=True)
    open_store(settings.store_url, project="bot").close()
    with served(settings) as running, running.entered() as client:
        assert "art-patch serve --base" in client.get("/p/bot/policies").text
