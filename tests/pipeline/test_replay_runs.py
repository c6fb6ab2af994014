"""Runs that production saw once, repeated by real processes of a real app against a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from art_patch._lib.ids import MOST_REPLAYS, replay_id
from art_patch.cli.app import app as commands
from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge
from art_patch.formats.complete import decode
from art_patch.grouping import ReplayConfig, ResampleConfig, branch_group, choose_comparisons, choose_replays
from art_patch.replay import RunLost
from art_patch.replay.processes import AppProcess
from art_patch.rewards import Judge
from art_patch.types import Group, Score, Trajectory, TrajectoryInfo
from tests.support.cycles import CONFIG, QUESTIONS, Place, eager, is_short
from tests.support.spooled import taken_over
from tests.support.store_samples import call

AGENT = """
import asyncio, os, sys, time
from functools import partial
from pathlib import Path

import art_patch as art
from openai import AsyncOpenAI, OpenAI

given = {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-x", "max_retries": 0}
client, later = OpenAI(**given), AsyncOpenAI(**given)
REPEATED = __name__ == "__replayed_main__"


def ask(question):
    return {"model": "m", "messages": [{"role": "user", "content": question}], "max_tokens": 12}


@art.trajectory("support", user_id="u", session_id="s")
@art.replayable
def answer(question: str) -> str:
    print("app talk")
    with open("runs.txt", "a") as file:
        file.write(question + "\\n")
    said = client.chat.completions.create(**ask(question)).choices[0].message.content
    if REPEATED and "fails" in question:
        raise ValueError("as it does")
    if REPEATED and "exits" in question:
        os._exit(3)
    if REPEATED and "hangs" in question:
        time.sleep(600)
    return said


@art.replayable
async def answer_later(question: str) -> str:
    return (await later.chat.completions.create(**ask(question))).choices[0].message.content


def keyed(question: str) -> None:
    with art.trajectory(scenario=f"ticket {question}", tags=["vip"]):
        answer.__wrapped__(question)  # the replayable one, without a run of its own


async def all_of(questions):
    for question in questions:
        await answer_later(question)


TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]


@art.replayable
def in_turns(question: str, streams: bool = False) -> None:
    # What the tool finds goes into the prompt of the next turn.
    conversation = [{"role": "user", "content": question}]
    for turn in range(3):
        kwargs = {"model": "m", "messages": conversation, "max_tokens": 8, "tools": TOOLS}
        if streams:
            chunks = client.chat.completions.create(**kwargs, stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        else:
            said = client.chat.completions.create(**kwargs).choices[0].message.content
        with open("turns.txt", "a") as file:
            file.write(f"{REPEATED} {turn} {said!r}\\n")
        if "gives up" in question and said == "" and REPEATED:
            return
        found = time.time() if "clock" in question else turn
        conversation += [{"role": "assistant", "content": said}, {"role": "user", "content": f"the tool found {found}"}]


@art.replayable
def helped(question: str) -> None:
    # The helper is a run of its own.
    conversation = [{"role": "user", "content": question}]
    for turn in range(2):
        with art.trajectory("helper"):
            client.chat.completions.create(**ask("help me"))
        said = client.chat.completions.create(model="m", messages=conversation, max_tokens=8).choices[0].message.content
        conversation += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]


streamed = partial(in_turns, streams=True)


def main(mode, *questions):
    art.patch()
    if mode == "async":
        asyncio.run(all_of(questions))
    else:
        for question in questions:
            {"sync": answer, "keyed": keyed, "turns": in_turns, "streams": streamed, "helped": helped}[mode](question)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


class App:
    """An agent in a file of its own, and the project it records into."""

    def __init__(self, place: Place, directory: Path) -> None:
        self.place = place
        self.file = directory / "agent.py"
        self.file.write_text(AGENT)
        self.environment = {
            "project": "agent",
            "home": str(directory / "home"),
            "store": place.url,
            "base_url": f"{place.client.base_url}/v1",
            "timeout_s": "60",
            "connect_timeout_s": "10",
        }

    def run(self, *arguments: str, module: bool = False) -> None:
        """Start it, as production does, once for each of the questions."""
        settings = {f"ART_PATCH_{name.upper()}": value for name, value in self.environment.items()}
        what = ["-c", "import sys, agent; agent.main(*sys.argv[1:])"] if module else [str(self.file)]
        subprocess.run([sys.executable, *what, *arguments], env={**os.environ, **settings}, check=True)
        taken_over(self.place.url, "agent")  # as `art-patch retrain` does when it opens the store

    def config(self, **changes: Any) -> ReplayConfig:
        return replace(ReplayConfig(samples=2, timeout_s=60.0, environment=self.environment), **changes)

    @property
    def runs(self) -> tuple[Trajectory, ...]:
        return self.place.store.read.recent(limit=200)

    def repeated(self) -> list[TrajectoryInfo]:
        return [run.info for run in self.runs if "replayed" in run.info.tags]


@pytest.fixture
def app(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)]))
    yield App(place, tmp_path)


def cycle(app: App, judge: Judge, replay: ReplayConfig | None, progress: Any = lambda *_: None, **changes: Any) -> Any:
    """A cycle, in the year that the app's calls are of."""
    from art_patch.pipeline import retrain

    config = replace(eager(CONFIG), replay=replay, **({"min_group_size": 3} | changes))
    return retrain(app.place.store, app.place.client, judge, app.place.adapters, config, who="test", progress=progress)


@pytest.mark.slow
def test_what_was_seen_once_is_repeated_and_learned_from(app: App, judge: Judge):
    app.run("sync", *QUESTIONS)
    assert cycle(app, judge, None).metrics["group"]["left"] == {"waits for a sibling": len(QUESTIONS)}
    assert app.repeated() == []  # off by default

    one_user = replace(eager(CONFIG).gate, run_samples=1, min_users=1, level=0.5)
    report = cycle(app, judge, app.config(), gate=one_user)
    metrics = report.metrics["replay"]
    read = app.place.store.read
    # What a random model says may be worth the same three times: such a group is dead, and was repeated all the same.
    groups = [*read.groups(state="trained"), *read.groups(state="dead")]
    assert report.outcome == "promoted", report
    assert (metrics["replayed"], metrics["raised"], metrics["lost"]) == (2 * len(groups), 0, 0)
    assert {(group.how, len(group.trajectories)) for group in groups} == {("same_task", 3)}
    for group in groups:
        original, *again = sorted(group.trajectories, key=lambda run: "replayed" in run.info.tags)
        assert [run.info.tags for run in again] == [("replayed",)] * 2
        assert {run.info.metadata["replay_of"] for run in again} == {original.id}
        assert {replay_id(original.id, number) for number in (1, 2)} == {run.id for run in again}
        assert {(run.info.user_id, run.info.session_id, run.info.name) for run in again} == {("u", "s", "support")}
        assert {run.calls[0].policy for run in group.trajectories} == {"agent@0"}
    held_out = app.place.store.read.groups(state="formed", held_out=True)
    assert len(held_out) == len(QUESTIONS) - len(groups)
    # The gate had both policies run what was held out, and nothing of that is in the store.
    reruns = report.metrics["gate"]["reruns"]
    assert reruns == {
        "scenarios": len(held_out),
        "runs": 2 * len(held_out),
        "lost_scenarios": 0,
        "lost": {},
        "left": {},
    }
    assert Path("runs.txt").read_text().count("\n") == len(QUESTIONS) + metrics["replayed"] + reruns["runs"]

    again = cycle(app, judge, app.config())
    assert again.metrics["replay"]["replayed"] == 0  # neither them nor their re-runs
    erased = app.place.store.rights.erase(user="u", who="test")
    assert erased.trajectories == len(QUESTIONS) + metrics["replayed"]


@pytest.mark.slow
def test_an_async_function_of_a_module_and_a_key_of_the_apps_own(app: App, judge: Judge):
    app.run("async", "one", "two", module=True)
    app.run("keyed", "three")
    report = cycle(app, judge, app.config(concurrency=1), holdout_share=0.0, min_groups=99)
    assert report.metrics["replay"]["replayed"] == 6, report
    groups = app.place.store.read.groups(state="scored")
    assert sorted(group.how for group in groups) == ["same_task", "same_task", "scenario_key"]
    assert all({len(run.calls) for run in group.trajectories} == {1} for group in groups)
    assert {info.tags for info in app.repeated() if info.scenario_key} == {("vip", "replayed")}


@pytest.mark.slow
def test_a_run_that_goes_wrong_is_lost_alone(app: App, judge: Judge):
    app.run("sync", "it fails", "it exits", "it hangs", "it works")
    # Long enough to start a process and to answer; what hangs would take ten minutes.
    config = app.config(samples=1, timeout_s=20.0)
    everything = {"holdout_share": 0.0, "min_groups": 99, "min_group_size": 2}
    metrics = cycle(app, judge, config, **everything).metrics["replay"]
    assert (metrics["replayed"], metrics["raised"], metrics["lost"]) == (2, 1, 2), metrics
    assert sorted(info.error or "" for info in app.repeated()) == [
        "",
        "ValueError: as it does",
        "it was run again: the process ended with exit code 3",
        "it was run again: took longer than 20 s",
    ]
    assert len(app.place.store.read.groups(state="scored")) == 2
    written = Path("runs.txt").read_text()
    # Long settled, what was recorded of the lost ones makes siblings; none of them is begun again.
    assert cycle(app, judge, config, **everything).metrics["replay"]["replayed"] == 0
    assert Path("runs.txt").read_text() == written


@pytest.mark.slow
@pytest.mark.parametrize("how", ["turns", "streams"])
def test_a_run_is_repeated_from_one_of_its_turns(how: str, app: App, judge: Judge):
    app.run(how, "how many plums?")
    (run,) = app.runs
    last = {"holdout_share": 0.0, "min_groups": 99, "resample": None}
    report = cycle(app, judge, app.config(begin="last", concurrency=1), **last)
    metrics = report.metrics["replay"]
    assert metrics == {"runs": 1, "replayed": 2, "raised": 0, "lost": 0, "left": {}, "other_way": 0, "groups": 1}
    (group,) = app.place.store.read.groups(state="scored")
    assert (group.how, group.held_out, group.scenario_key) == ("branched", False, group.scenario_key)
    copy, *again = sorted(group.trajectories, key=lambda one: "replayed" in one.info.tags)
    # The recorded run stands in the group from this turn on, as do those that began there.
    assert (copy.info.origin, [call.shadow_of for call in copy.calls]) == ("branch", [run.calls[2].id])
    assert [one.info.metadata["replay_from"] for one in again] == [run.calls[2].id] * 2
    for one in (copy, *again):
        (call,) = one.calls
        assert (call.messages, call.tools) == (run.calls[2].messages, run.calls[2].tools)
        assert call.prompt_token_ids == run.calls[2].prompt_token_ids
        assert (call.policy, call.untrainable) == ("agent@0", None)
    # What was said before was said again, word for word, and no policy was asked for it.
    lines = [line.split(" ", 2)[1:] for line in Path("turns.txt").read_text().splitlines()]
    assert lines[3:5] == lines[6:8] == lines[:2]
    # Neither the run nor its repetitions are used once more.
    before = len(app.place.store.read.recent(limit=200))
    assert cycle(app, judge, app.config(begin="last"), **last).metrics["replay"]["runs"] == 0
    assert len(app.place.store.read.recent(limit=200)) == before
    erased = app.place.store.rights.erase(trajectory=run.id, who="test")
    assert erased.trajectories == 4
    assert app.place.store.read.groups(state="scored") == ()


def from_the_last_turn(app: App, judge: Judge, *arguments: str) -> Any:
    """Record a run, and what a cycle tells of its repetitions that begin at its last turn."""
    app.run(*arguments)
    config = app.config(begin="last")
    return cycle(app, judge, config, holdout_share=0.0, min_groups=99, resample=None).metrics["replay"]


@pytest.mark.slow
def test_calls_of_other_runs_inside_the_function_do_not_lead_astray(app: App, judge: Judge):
    metrics = from_the_last_turn(app, judge, "helped", "how many plums?")
    assert (metrics["replayed"], metrics["other_way"], metrics["groups"]) == (2, 0, 1), metrics


@pytest.mark.slow
def test_what_a_killed_cycle_repeated_is_used_once(app: App, judge: Judge):
    app.run("turns", "how many plums?")
    (run,) = app.runs
    # A file of runs brought the id that a repetition would have.
    other = TrajectoryInfo(replay_id(run.id, 3), 1.0, "imported")
    app.place.store.write([other, call("other", other.id)])

    def dies(stage: str, done: int, total: int, *_: Any) -> None:
        if stage == "replay" and done == total == 2:
            raise KeyboardInterrupt

    everything = {"holdout_share": 0.0, "min_groups": 99, "resample": ResampleConfig(samples=2)}
    replay = app.config(begin="last", samples=3)
    with pytest.raises(KeyboardInterrupt):
        cycle(app, judge, replay, progress=dies, **everything)
    read = app.place.store.read
    assert (len(app.repeated()), read.group_ids(state="branched")) == (2, ())
    metrics = cycle(app, judge, replay, **everything).metrics
    assert (metrics["replay"]["replayed"], metrics["replay"]["groups"]) == (0, 1), metrics
    # No turn of it was answered again on top of that, as of a run that found no siblings.
    (own,) = read.groups(state="branched")
    assert [one.id for one in own.trajectories] == [run.id]
    assert [len(group.trajectories) for state in ("formed", "scored") for group in read.groups(state=state)
            if group.how == "branched"] == [3]  # fmt: skip


@pytest.mark.slow
def test_a_run_that_takes_another_way_before_its_turn_is_stopped_there(app: App, judge: Judge):
    metrics = from_the_last_turn(app, judge, "turns", "what does the clock say?")
    assert (metrics["replayed"], metrics["other_way"], metrics["groups"]) == (0, 2, 0), metrics
    # Neither asked a policy, so nothing was recorded of them but why.
    again = [run for run in app.runs if "replayed" in run.info.tags]
    assert [(run.info.error, run.calls) for run in again] == [("it was run again: it came to no such turn", ())] * 2
    assert Path("turns.txt").read_text().count("True 0") == 2
    assert "True 1" not in Path("turns.txt").read_text()


def test_a_run_takes_its_repetitions_along(app: App, judge: Judge):
    app.run("sync", "one", "two")
    cycle(app, judge, app.config(), holdout_share=0.0, min_groups=99)
    (group, _) = app.place.store.read.groups(state="scored")
    (original,) = [run for run in group.trajectories if "replayed" not in run.info.tags]
    assert app.place.store.rights.erase(trajectory=original.id, who="test").trajectories == 3
    assert len(app.runs) == 3
    (left,) = [run for run in app.runs if "replayed" not in run.info.tags]
    again = min(run.info.started_at for run in app.runs if run.id != left.id)
    app.place.store.rights.prune(older_than_s=0.0, who="test", now=again)  # older than all re-runs, and no re-run
    assert app.runs == ()


@pytest.mark.slow
def test_what_cannot_be_repeated_is_told_and_not_used_up(app: App, judge: Judge, tmp_path: Path):
    app.run("sync", "one")
    everything = {"holdout_share": 0.0, "min_groups": 99}
    app.place.store.ledger.set_mode("record", who="test")
    assert cycle(app, judge, app.config(), **everything).metrics["replay"]["left"] == {
        "the mode is record, not route": 1
    }
    app.place.store.ledger.set_mode(None, who="test")
    app.file.write_text("import nothing_like_it\n" + AGENT)
    (reason,) = cycle(app, judge, app.config(), **everything).metrics["replay"]["left"]
    assert reason == f"{app.file}:answer: ModuleNotFoundError: No module named 'nothing_like_it'"
    app.file.write_text(AGENT.replace("@art.replayable\n", ""))
    (reason,) = cycle(app, judge, app.config(), **everything).metrics["replay"]["left"]
    assert reason.endswith("is not offered; put @art_patch.replayable above it")
    app.file.write_text(AGENT)
    assert app.repeated() == []
    assert cycle(app, judge, app.config(), **everything).metrics["replay"]["replayed"] == 2


def test_what_was_redacted_is_not_repeated_unredacted(app: App):
    app.environment["redact"] = "secrets"
    app.run("sync", "one")
    (run,) = app.runs
    assert run.info.metadata["replay"]["redacted"] is True
    process = AppProcess(f"{app.file}:answer", app.config(), redacted=True)
    assert process.ask(None, 60.0) == {"ready": True}
    process.end()
    del app.environment["redact"]
    process = AppProcess(f"{app.file}:answer", app.config(), redacted=True)
    assert "set ART_PATCH_REDACT for the job" in process.ask(None, 60.0)["error"]
    process.end()


def test_nothing_but_what_was_offered_here_is_run(app: App, tmp_path: Path):
    for target, says in {
        "os:system": "is not offered",
        ":x": "ModuleNotFoundError",
        "/etc/passwd:root": "outside of",
        "no_such_module:x": "ModuleNotFoundError",
    }.items():
        process = AppProcess(target, app.config())
        assert says in process.ask(None, 60.0)["error"]
        process.end()
    with pytest.raises(RunLost, match="cannot be started"):
        AppProcess("os:system", app.config(python="/no/such/python"))


DROPS = "from pathlib import Path\nPath('dropped').touch()\n\n\ndef x(): ...\n"


def offering(target: str, number: int) -> dict[str, Any]:
    """A line of a file of trajectories, whose run claims that `target` may be called again."""
    key, at = f"{number:032x}", time.time() - 3600.0
    offer = {"target": target, "args": [], "kwargs": {}}
    asked = {"role": "user", "content": QUESTIONS[number]}
    answer = {"index": 0, "message": {"role": "assistant", "content": "as ever"}, "finish_reason": "stop"}
    sampled = {"policy": "agent@0", "prompt_token_ids": [1, 2]}
    answer |= {"token_ids": [3], "logprobs": [-0.5]}
    about = {"id": f"{key}-0", "started_at": at, "requested_model": "m", "messages": [asked], "choices": [answer]}
    run = {"id": key, "started_at": at, "scenario_key": str(number), "metadata": {"lang": "de", "replay": offer}}
    return {"format": "art_patch.trajectory/1", "trajectory": run, "calls": [about | sampled]}


def command(app: App, *arguments: str) -> dict[str, Any]:
    """What an `art-patch` command says."""
    place = ("--store", app.place.url, "--home", app.environment["home"], "--json")
    result = CliRunner().invoke(commands, [*arguments, *place])
    assert result.exit_code in (0, 4), result.output
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["imported now", "in the store already"])
def test_a_file_of_runs_has_nothing_executed(how: str, app: App, tmp_path: Path):
    for directory in (tmp_path, tmp_path / "tools"):
        directory.mkdir(exist_ok=True)
        (directory / "drop_everything.py").write_text(DROPS)
    (tmp_path / "tools" / "__init__.py").write_text(DROPS)
    targets = (f"{tmp_path}/drop_everything.py:x", "drop_everything:x", "tools.drop_everything:x")
    lines = [offering(target, number) for number, target in enumerate(targets)]
    if how == "imported now":
        (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, lines)))
        told = command(app, "import", str(tmp_path / "runs.jsonl"))
        assert (told["trajectories"], told["offers_dropped"]) == (3, 3)
        assert [run.info.metadata for run in app.runs] == [{"lang": "de", "replay": None}] * 3
        left = {"no function to run again": 3}
    else:
        for line in lines:
            app.place.store.write(decode(line).records)
        left = {f"{one}: {one} is not offered; put @art_patch.replayable above it": 1 for one in targets}
    app.place.store.ledger.set_engine(f"{app.place.client.base_url}/v1", who="test")
    with serve_stand_in_judge(is_short) as url:
        judge = ("--judge", STAND_IN_MODEL, "--judge-base-url", url)
        told = command(app, "retrain", "--replay", "1", *judge)
    assert told["metrics"]["replay"] == {"runs": 3, "replayed": 0, "raised": 0, "lost": 0, "left": left}
    assert not Path("dropped").exists()


TOUCHES = "from pathlib import Path\nPath('executed').touch()\n"

OFFERS = {
    "import art_patch as art\n@art.replayable\ndef f(): ...": True,
    "from art_patch import replayable, trajectory\n@trajectory('x')\n@replayable\nasync def f(): ...": True,
    "from art_patch import replayable as again\nif True:\n    @again\n    def f(): ...": True,
    "import art_patch\ndef f(): ...\nanswer = art_patch.trajectory()(art_patch.replayable(f))": True,
    "import art_patch as art\ndef f(): ...\nanswer = art.replayable(function=f)": True,
    "import art_patch as art\n@art.replayable\ndef g(): ...\ndef f(): ...": False,
    "import art_patch as art\nclass A:\n    @art.replayable\n    def f(): ...": False,
    "import art_patch as art\ndef f(): ...\nfor each in (f,):\n    art.replayable(each)": False,
    "# @art.replayable\ndef f(): ...": False,
    "@art.replayable\ndef f(:": False,
}


def test_only_a_source_that_offers_the_function_is_executed(app: App, tmp_path: Path):
    (tmp_path / "package").mkdir()  # of no __init__.py
    for number, (source, is_offered) in enumerate(OFFERS.items()):
        (tmp_path / "package" / f"m{number}.py").write_text(TOUCHES + source)
        process = AppProcess(f"package.m{number}:f", app.config())
        word = process.ask(None, 60.0)
        assert (word == {"ready": True}, Path("executed").exists()) == (is_offered, is_offered), (source, word)
        process.end()
        Path("executed").unlink(missing_ok=True)


def test_what_lies_beside_a_link_to_a_script_is_not_imported(app: App, tmp_path: Path):
    (tmp_path / "agent.py").write_text("import colorsys\nimport art_patch as art\n@art.replayable\ndef f(): ...")
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / "colorsys.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    (elsewhere / "agent.py").symlink_to(tmp_path / "agent.py")
    process = AppProcess(f"{elsewhere / 'agent.py'}:f", app.config())
    assert (process.ask(None, 60.0), Path("executed").exists()) == ({"ready": True}, False)
    process.end()


def lonely(key: str, *, offer: bool = True, trainable: bool = True) -> Trajectory:
    metadata = {"replay": {"target": "m:f", "args": [key], "kwargs": {}}} if offer else {}
    why = None if trainable else "answered by upstream"
    return Trajectory(TrajectoryInfo(key, 1.0, metadata=metadata), (call(f"c-{key}", key, untrainable=why),))


def chosen(runs: list[Trajectory], keys: dict[str, str], made: set[tuple[str, int]] = set(), **config: Any) -> Any:  # noqa: B006
    found, left = choose_replays(runs, ReplayConfig(**config), keys=keys, was_made=lambda *one: one in made)
    return [(one.original.id, one.number) for one in found], left


def test_so_many_are_run_as_the_task_lacks():
    a, b, c = lonely("a"), lonely("b"), lonely("c", trainable=False)
    assert chosen([a], {"a": "x"}) == ([("a", 1), ("a", 2), ("a", 3)], {})
    assert chosen([a, b], {"a": "x", "b": "x"}) == ([("a", 1), ("b", 1)], {})
    assert chosen([c], {"c": "x"}) == ([("c", 1), ("c", 2), ("c", 3), ("c", 4)], {})
    assert chosen([a], {"a": "x"}, {("a", 1), ("a", 3)}) == ([("a", 2)], {})
    assert chosen([a], {"a": "x"}, {("a", n) for n in (1, 2, 3)}) == ([], {"run again already": 1})
    assert chosen([a, b], {"a": "x", "b": "y"}, max_runs=4)[1] == {"beyond the budget of this cycle": 1}
    odd = lonely("d", offer=False)
    assert chosen([odd], {"d": "x"}) == ([], {"no function to run again": 1})
    again = replace(a, info=replace(a.info, metadata={**a.info.metadata, "replay_of": "z"}))
    for other in (again, replace(a, info=replace(a.info, origin="imported"))):
        assert chosen([other], {"a": "x"}) == ([], {"no function to run again": 1})


def test_each_run_is_repeated_from_a_turn_of_its_own():
    calls = tuple(call(f"c{n}", "a", untrainable=None if n else "no answer") for n in range(4))
    a, b = replace(lonely("a"), calls=calls), lonely("b")
    config = ReplayConfig(samples=2, begin="last")
    found, left = choose_replays([a, b], config, keys={"a": "x", "b": "x"}, was_made=lambda *one: one == ("b", 2))
    assert [(one.original.id, one.number, one.turn and one.turn.id) for one in found] == [
        ("a", 1, "c3"), ("a", 2, "c3"), ("b", 1, "c-b"),
    ]  # fmt: skip
    assert [each.id for each in found[0].before] == ["c0", "c1", "c2"]
    assert (found[2].before, left) == ((), {})
    named, _ = choose_replays(
        [a], replace(config, begin="fault"), keys={"a": "x"}, was_made=lambda *one: False, corrected={"a": "c2"}
    )
    assert {one.turn and one.turn.id for one in named} == {"c2"}
    hidden = replace(a, info=replace(a.info, metadata={"replay": {**a.info.metadata["replay"], "redacted": True}}))
    silent = replace(a, calls=calls[:1])
    for run, why in (
        (hidden, "it was redacted, so it cannot begin at a turn"),
        (silent, "no turn can be answered again"),
    ):
        assert choose_replays([run], config, keys={"a": "x"}, was_made=lambda *one: False) == ((), {why: 1})


def test_what_follows_a_turn_is_compared_with_the_runs_that_came_to_it():
    first, turn, after = (call(f"c{n}", "a", messages=({"role": "user", "content": f"{n}"},)) for n in range(3))
    own = [Score("s1", "a", "reward", 0.5, "code", 2.0), Score("s2", "a", "ruler", 0.1, "ruler", 3.0, group_id="g")]
    a = replace(lonely("a"), calls=(first, turn, after), scores=tuple(own))

    def again(key: str, **changes: Any) -> Trajectory:
        info = TrajectoryInfo(key, 9.0, metadata={"replay_of": "a", "replay_from": "c1"})
        return Trajectory(info, (replace(turn, id=f"{key}-1", trajectory_id=key, **changes),))

    ids = (f"n{number}" for number in count())
    there, other_text = again("there"), again("text", messages=({"role": "user", "content": "else"},))
    others = [other_text, again("ids", prompt_token_ids=(7, 7)), again("tools", tools=({"type": "function"},))]
    group = branch_group(a, [there, *others], scenario_key="x", new_id=lambda: next(ids))
    assert group is not None
    copy = group.trajectories[0]
    assert group == Group(group.id, "x", "branched", (copy, there))
    assert [(each.shadow_of, each.trajectory_id, each.messages) for each in copy.calls] == [
        ("c1", copy.id, turn.messages),
        ("c2", copy.id, after.messages),
    ]
    assert [(one.name, one.value, one.trajectory_id) for one in copy.scores] == [("reward", 0.5, copy.id)]
    assert (copy.info.origin, copy.info.metadata) == ("branch", {})
    assert len({"a", copy.id, group.id, *(each.id for each in (*copy.calls, *copy.scores, *a.calls, *own))}) == 11
    assert branch_group(a, others, scenario_key="x", new_id=lambda: next(ids)) is None
    # A repetition from the start may come to the turn, too, but its calls before the turn are not compared here.
    whole = replace(again("whole"), info=TrajectoryInfo("whole", 9.0, metadata={"replay_of": "a"}))
    earlier = replace(again("earlier"), info=TrajectoryInfo("e", 9.0, metadata={"replay_of": "a", "replay_from": "c0"}))
    mixed = branch_group(a, [earlier, whole, there], scenario_key="x", new_id=lambda: next(ids))
    assert mixed is not None and mixed.trajectories[1:] == (there,)
    assert branch_group(a, [whole], scenario_key="x", new_id=lambda: next(ids)) is None
    assert branch_group(a, [], scenario_key="x", new_id=lambda: next(ids)) is None


def test_one_run_stands_for_each_scenario_that_the_gate_compares():
    a, b, odd = lonely("a").info, replace(lonely("b").info, origin="span"), lonely("c", offer=False).info
    runs = {"x": (odd, a), "y": (b,), "z": (odd,), "w": (a,)}
    found, left = choose_comparisons(runs, ReplayConfig(max_runs=8), samples=2)
    assert {key: (one.original.id, one.number, one.args) for key, one in found.items()} == {
        "x": ("a", 0, ["a"]),
        "w": ("a", 0, ["a"]),
    }
    assert left == {"no function to run again": 2}
    assert choose_comparisons(runs, ReplayConfig(max_runs=7), samples=2)[1]["beyond the budget of this cycle"] == 1


def test_ids_of_repetitions_are_always_the_same():
    ids = {replay_id(of, number) for of in ("a", "b") for number in range(1, MOST_REPLAYS + 1)}
    assert len(ids) == 2 * MOST_REPLAYS
    assert replay_id("a", 1) == replay_id("a", 1)
