"""Two projects in one process: each wrapped client has its project's record, route and engine, and nothing crosses.

What the planner's client asks says `zebra`, and so does what its engine and its provider answer; the writer's say
`okapi`. An attempt has crossed if the word of one project is in the other's store, or reached the other's engine.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

import art_patch as art
from art_patch.context.integration import Run
from art_patch.errors import ConfigError
from art_patch.store import open_store
from art_patch.types import Trajectory
from tests.support.servers import Answer, StubServer, chunks, completion

WORDS = {"planner": "zebra", "writer": "okapi"}
NAMES = ("planner", "writer")
PATIENT: dict[str, Any] = {
    "poll_interval_s": 0.05,
    "flush_interval_s": 0.005,
    "connect_timeout_s": 5.0,
    "first_token_timeout_s": 20.0,
}


class Marked(StubServer):
    """A server whose answers say a word."""

    word = ""

    def answer(self, body: Any, path: str = "") -> Answer:
        if self.script or self.always is not None:
            return super().answer(body, path)
        if body.get("stream"):
            return Answer(events=[event.replace(b"Hello", self.word.encode()) for event in chunks(body)])
        return Answer(body=json.dumps(completion(body, content=f"{self.word} it is")).encode())


class Two:
    """Two projects with a provider, an engine, a store and clients each."""

    def __init__(self, home: Path, shared: bool, servers: Sequence[dict[str, Marked]], stack: ExitStack) -> None:
        self.home, self.stack = home, stack
        self.upstreams, self.engines = servers
        self.urls = {name: f"sqlite:///{home}/{'all' if shared else name}.db" for name in NAMES}
        for name in NAMES:
            store = open_store(self.urls[name], project=name)
            store.ledger.add_base(f"{WORDS[name]}@0", "/base", "ff", who="t")
            store.ledger.set_engine(self.engines[name].url, who="t")
            store.ledger.set_mode("route", who="t")
            store.close()

    def settings(self, name: str) -> dict[str, Any]:
        return {"project": name, "home": self.home, "store": self.urls[name], **PATIENT}

    def client(self, name: str, kind: Any = openai.OpenAI, **options: Any) -> Any:
        """A client of the project's provider, not wrapped."""
        url = self.upstreams[name].url
        made = kind(api_key=f"sk-{WORDS[name]}", base_url=url, max_retries=0, **options)
        if kind is openai.OpenAI:
            self.stack.callback(made.close)
        return made

    def wrapped(self, name: str, kind: Any = openai.OpenAI, **settings: Any) -> Any:
        return art.wrap(self.client(name, kind), **self.settings(name) | settings)

    def both(self, kind: Any = openai.OpenAI) -> tuple[Any, Any]:
        planner, writer = (self.wrapped(name, kind) for name in NAMES)
        return planner, writer

    def runs(self, name: str) -> Sequence[Trajectory]:
        assert art.flush(10)
        store = open_store(self.urls[name], create=False, project=name)
        found = store.read.recent(limit=1000)
        assert store.verify() == []
        store.close()
        return found

    def calls(self, name: str) -> int:
        return sum(call.shadow_of is None for run in self.runs(name) for call in run.calls)

    def crossed(self) -> list[str]:
        """Where the word of one project is found in the other."""
        found = []
        for mine, theirs in (NAMES, NAMES[::-1]):
            word = WORDS[theirs]
            if word in repr(self.runs(mine)):
                found.append(f"{word} in the store of {mine}")
            if any(word in str(seen) for seen in self.engines[mine].seen):
                found.append(f"{word} at the engine of {mine}")
            if any(word in str(seen) for seen in self.upstreams[mine].seen):
                found.append(f"{word} at the provider of {mine}")
        return found


def ask(client: Any, name: str, question: str = "where?", **more: Any) -> Any:
    said = {"role": "user", "content": f"{WORDS[name]}: {question}"}
    return client.chat.completions.create(model="gpt-x", messages=[said], **more)


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def counts(two: Two, planner: int, writer: int) -> None:
    assert (two.calls("planner"), two.calls("writer")) == (planner, writer)


def served(two: Two, planner: int, writer: int) -> None:
    """So many calls of each are recorded, and its own engine answered all of them."""
    counts(two, planner, writer)
    for name, expected in zip(NAMES, (planner, writer), strict=True):
        assert len(two.engines[name].seen) == expected
        assert {call.policy for run in two.runs(name) for call in run.calls} == {f"{WORDS[name]}@0"}


# The attempts.


def calls(two: Two) -> None:
    planner, writer = two.both()
    for _ in range(2):
        assert "zebra" in ask(planner, "planner").choices[0].message.content
        assert "okapi" in ask(writer, "writer").choices[0].message.content
    served(two, 2, 2)


def streams_that_interleave(two: Two) -> None:
    planner, writer = two.both()
    first, second = ask(planner, "planner", stream=True), ask(writer, "writer", stream=True)
    for a, b in zip(first, second, strict=True):
        assert (a.model, b.model) == ("gpt-x", "gpt-x")
    served(two, 1, 1)


def asynchronous_calls(two: Two) -> None:
    async def main() -> None:
        planner, writer = two.both(openai.AsyncOpenAI)
        async with planner, writer:
            await asyncio.gather(
                *(ask(client, name) for client, name in zip((planner, writer), NAMES, strict=True) for _ in range(8))
            )

    asyncio.run(main())
    served(two, 8, 8)


def asynchronous_streams(two: Two) -> None:
    async def read(client: Any, name: str) -> None:
        with art.trajectory(f"{WORDS[name]} run", user_id=WORDS[name]):
            async for _ in await ask(client, name, stream=True):
                await asyncio.sleep(0)
            art.score("thumbs", 1.0, comment=WORDS[name])

    async def main() -> None:
        planner, writer = two.both(openai.AsyncOpenAI)
        async with planner, writer:
            await asyncio.gather(*(read(c, n) for c, n in zip((planner, writer), NAMES, strict=True) for _ in range(4)))

    asyncio.run(main())
    served(two, 4, 4)
    for name in NAMES:
        assert {(run.info.user_id, len(run.scores)) for run in two.runs(name)} == {(WORDS[name], 1)}


def threads(two: Two) -> None:
    clients = dict(zip(NAMES, two.both(), strict=True))

    def work(number: int) -> None:
        name = NAMES[number % 2]
        with art.trajectory(WORDS[name], metadata={"said": WORDS[name]}), art.span(WORDS[name]):
            ask(clients[name], name)
            art.score("thumbs", 1.0, comment=WORDS[name])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))
    served(two, 20, 20)
    for name in NAMES:
        assert all(len(run.scores) == len(run.spans) == 1 for run in two.runs(name))


def a_run_of_both(two: Two) -> None:
    """The run is in both projects, each with its own calls and spans; its score is, too."""
    planner, writer = two.both()
    with art.trajectory("article", user_id="u1") as run:
        with art.span("zebra plan"):
            ask(planner, "planner")
        with art.span("okapi draft"), art.span("okapi sentence"):
            ask(writer, "writer")
        with art.span("neither"):
            pass
        art.reward(1.0)
    for name, spans in (("planner", {"zebra plan"}), ("writer", {"okapi draft", "okapi sentence"})):
        (found,) = two.runs(name)
        assert (found.info.id, found.info.user_id, len(found.calls)) == (run.id, "u1", 1)
        assert found.info.ended_at is not None
        assert {span.name for span in found.spans} == spans
        assert [score.value for score in found.scores] == [1.0]


def a_correction_is_of_the_latest_call(two: Two) -> None:
    planner, writer = two.both()
    with art.trajectory("article") as run:
        ask(planner, "planner")
        ask(writer, "writer")
        art.correct("okapi, of course")
    art.correct("zebra, of course", trajectory_id=run.id, project="planner")
    for name in NAMES:
        assert art.flush(10)
        store = open_store(two.urls[name], create=False, project=name)
        ((found,),) = store.evidence.corrections([run.id]).values()
        store.close()
        assert found.message["content"].startswith(WORDS[name])


def scores_before_the_first_call(two: Two) -> None:
    clients = dict(zip(NAMES, two.both(), strict=True))
    for name in NAMES:
        with art.trajectory(WORDS[name], metadata={"said": WORDS[name]}):
            art.score("early", 0.5, comment=WORDS[name])
            ask(clients[name], name)
        (run,) = two.runs(name)
        assert [score.name for score in run.scores] == ["early"]


def scores_after_the_run(two: Two) -> None:
    clients = dict(zip(NAMES, two.both(), strict=True))
    ids = {}
    for name in NAMES:
        with art.trajectory() as run:
            ask(clients[name], name)
        ids[name] = run.id
    for name in NAMES:
        art.score("thumbs", 1.0, trajectory_id=ids[name], comment=WORDS[name])
        (run,) = two.runs(name)
        assert [score.comment for score in run.scores] == [WORDS[name]]


def scores_of_another_process(two: Two) -> None:
    """This process knows of no call of the run, so only `project=` says where a score belongs."""
    two.both()
    code = """
import sys, openai, art_patch as art
store, url = sys.argv[1:]
client = art.wrap(openai.OpenAI(api_key="k", base_url=url), project="writer", store=store)
with art.trajectory(id="theirs"):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "okapi?"}])
"""
    apart(code, two.urls["writer"], two.upstreams["writer"].url, home=two.home)
    art.score("lost", 1.0, trajectory_id="theirs", comment="okapi")
    assert art.status().errors == {"context.no_project": 1}
    art.score("thumbs", 1.0, trajectory_id="theirs", project="writer", comment="okapi")
    with pytest.raises(ConfigError, match=r"'reader'.*planner, writer"):
        art.score("thumbs", 1.0, trajectory_id="theirs", project="reader")
    (run,) = two.runs("writer")
    assert [score.name for score in run.scores] == ["thumbs"]
    assert two.runs("planner") == ()


def steps_of_a_framework(two: Two) -> None:
    """Steps hold texts: they go where the calls inside them went, or those of the step around them."""
    clients = dict(zip(NAMES, two.both(), strict=True))
    run = Run("graph")
    for name in NAMES:
        node = run.step(WORDS[name], input=WORDS[name])
        with run.inside(node):
            ask(clients[name], name)
        tool = run.step(f"{WORDS[name]} tool", "tool", parent=node, input=WORDS[name])
        tool.end(output=WORDS[name])
        node.end(output=WORDS[name])
    run.step("zebra and okapi").end(output="zebra okapi")
    run.end(output="zebra okapi")
    for name in NAMES:
        (found,) = two.runs(name)
        assert {span.name for span in found.spans} == {WORDS[name], f"{WORDS[name]} tool"}


def copies_of_clients(two: Two) -> None:
    planner, writer = two.both()
    ask(planner.with_options(timeout=30).copy(), "planner")
    ask(writer.copy().with_options(timeout=30), "writer")
    served(two, 1, 1)


def engines_that_fail(two: Two) -> None:
    planner, writer = two.both()
    two.engines["planner"].always = Answer(status=500, body=b"{}")
    for _ in range(8):
        assert "zebra" in ask(planner, "planner").choices[0].message.content
        assert "okapi" in ask(writer, "writer").choices[0].message.content
    counts(two, 8, 8)
    status = art.status()
    assert [sentence for sentence in status.degraded if "engine" in sentence]
    assert (status.projects["planner"].fallbacks, status.projects["writer"].fallbacks) == (8, 0)
    told = json.loads(json.dumps(status.as_dict()))
    assert (told["fallbacks"], told["projects"]["planner"]["fallbacks"], told["projects"]["writer"]["mode"]) == (
        8, 8, "route",
    )  # fmt: skip
    assert (len(two.upstreams["planner"].seen), len(two.upstreams["writer"].seen)) == (8, 0)
    assert len(two.engines["planner"].seen) == 5, "its breaker is open, and the writer's is not"


def a_mode_of_one(two: Two) -> None:
    planner, writer = two.both()
    store = open_store(two.urls["planner"], project="planner")
    store.ledger.set_mode("off", who="t")
    store.close()
    deadline = time.monotonic() + 20
    ask(planner, "planner")
    while art.status().projects["planner"].mode != "off":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = two.calls("planner")
    with art.trajectory("off"):
        ask(planner, "planner")
        art.score("zebra", 1.0)
    ask(writer, "writer")
    counts(two, before, 1)


def redaction_of_one(two: Two) -> None:
    planner, writer = two.wrapped("planner", redact=lambda text: text.replace("zebra", "***")), two.wrapped("writer")
    ask(planner, "planner")
    ask(writer, "writer")
    assert "zebra" not in repr([(call.messages, call.choices) for run in two.runs("planner") for call in run.calls])
    assert "okapi" in repr(two.runs("writer"))
    counts(two, 1, 1)


def conversations_with_the_same_words(two: Two) -> None:
    """Calls without a trajectory are put together by what they continue, in each project alone."""
    clients = dict(zip(NAMES, two.both(), strict=True))
    for name in (*NAMES, *NAMES):
        said: list[Any] = [{"role": "user", "content": "the same?"}]
        for _ in range(2):
            answer = clients[name].chat.completions.create(model="gpt-x", messages=said)
            said += [answer.choices[0].message.to_dict(), {"role": "user", "content": "and?"}]
    for name in NAMES:
        assert [len(run.calls) for run in two.runs(name)] == [2, 2]


def shadows(two: Two) -> None:
    for name in NAMES:
        store = open_store(two.urls[name], project=name)
        store.ledger.set_mode("shadow", who="t")
        store.close()
    planner, writer = two.both()
    ask(planner, "planner")
    ask(writer, "writer")
    counts(two, 1, 1)
    deadline = time.monotonic() + 20
    while art.status().shadowed < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [len(two.engines[name].seen) for name in NAMES] == [1, 1]


def a_fork(two: Two) -> None:
    """The child goes on in both projects, with a queue of its own for each."""
    planner, writer = two.both()
    with art.trajectory("forked", id="forked"):
        ask(planner, "planner", "before")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ask(two.wrapped("planner"), "planner", "child")
                ask(two.wrapped("writer"), "writer", "child")
                art.score("child", 1.0)
                code = 0 if art.flush(20) else 2
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        ask(writer, "writer", "after")
    counts(two, 2, 2)
    for name in NAMES:
        (run,) = two.runs(name)
        assert [score.name for score in run.scores] == ["child"]


EXIT = """
import sys, openai, art_patch as art
home, *rest = sys.argv[1:]
for name, word, store, url in zip(*[iter(rest)] * 4):
    client = art.wrap(openai.OpenAI(api_key="k", base_url=url), project=name, home=home, store=store)
    with art.trajectory(word):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": word}])
        art.score("thumbs", 1.0, comment=word)
"""


def apart(code: str, *arguments: object, home: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("ART_PATCH_", "PYTEST"))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment | {"HOME": str(home)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def an_exit(two: Two) -> None:
    """A process that ends writes both records, without a flush of its own."""
    rest = [(name, WORDS[name], two.urls[name], two.upstreams[name].url) for name in NAMES]
    apart(EXIT, two.home, *(each for four in rest for each in four), home=two.home)
    for name in NAMES:
        (run,) = two.runs(name)
        assert (len(run.calls), len(run.scores)) == (1, 1)


def a_stream_that_outlives_the_patch(two: Two) -> None:
    planner, writer = two.both()
    first, second = ask(planner, "planner", stream=True), ask(writer, "writer", stream=True)
    next(first), next(second)
    art.unpatch()
    assert not art.status().patched
    ask(planner, "planner", "not recorded")
    text_of(first), text_of(second)
    assert art.flush(10)
    counts(two, 1, 1)
    assert art.status().recorded == 2


def beside_the_process_s_own(two: Two) -> None:
    """`patch()` has all other clients, and what belongs to none."""
    art.patch(**two.settings("planner"))
    writer = two.wrapped("writer")
    plain = two.client("planner")
    ask(plain, "planner")
    ask(writer, "writer")
    with art.trajectory("okapi"):
        art.score("early", 0.5, comment="okapi")
        ask(writer, "writer")
    with art.trajectory("zebra"):
        ask(plain, "planner")
        art.score("thumbs", 1.0, comment="zebra")
    art.score("late", 1.0, trajectory_id="of another process", comment="zebra")
    served(two, 2, 2)
    assert [score.name for run in two.runs("writer") for score in run.scores] == ["early"]
    assert art.status().champion == "zebra@0"


def a_pool_of_both(two: Two) -> None:
    """Clients are known by their connection pool, so one pool cannot have two projects."""
    planner = two.wrapped("planner")
    other = two.client("planner", http_client=planner._client)
    with pytest.raises(ConfigError, match="planner"):
        art.wrap(other, **two.settings("writer"))
    ask(planner, "planner")
    ask(other, "planner")
    counts(two, 2, 0)


def contexts_that_wander(two: Two) -> None:
    """A trajectory that a context carries elsewhere is recorded where its calls are made."""
    planner, writer = two.both()
    with art.trajectory("okapi", session_id="okapi"):
        carried = contextvars.copy_context()
        bound = art.bind(lambda: ask(writer, "writer"))
    with art.trajectory("zebra", session_id="zebra"):
        threads = [threading.Thread(target=bound), threading.Thread(target=carried.run, args=(bound,))]
        for thread in threads:
            thread.start()
        ask(planner, "planner")
        for thread in threads:
            thread.join()
    counts(two, 1, 2)


def settings_of_one(two: Two) -> None:
    """A later `wrap` with the same project changes this project alone."""
    planner, writer = two.both()
    art.wrap(planner, project="planner", match="nothing-*")
    ask(planner, "planner")
    ask(writer, "writer")
    counts(two, 0, 1)
    art.wrap(planner, match="gpt-*")
    ask(planner, "planner")
    counts(two, 1, 1)


def settings_that_change_during_calls(two: Two) -> None:
    planner, writer = two.both()
    busy = True

    def work(client: Any, name: str) -> None:
        while busy:
            ask(client, name)

    workers = [threading.Thread(target=work, args=pair) for pair in ((planner, "planner"), (writer, "writer"))]
    for worker in workers:
        worker.start()
    for number in range(6):
        art.wrap((planner, writer)[number % 2], sample_rate=0.9 + number / 100)
    art.unpatch()
    busy = False
    for worker in workers:
        worker.join()


ATTEMPTS: dict[str, Callable[[Two], None]] = {
    attempt.__name__.replace("_", " "): attempt
    for attempt in (
        calls, streams_that_interleave, asynchronous_calls, asynchronous_streams, threads, a_run_of_both,
        a_correction_is_of_the_latest_call, scores_before_the_first_call, scores_after_the_run,
        scores_of_another_process, steps_of_a_framework, copies_of_clients, engines_that_fail, a_mode_of_one,
        redaction_of_one, conversations_with_the_same_words, shadows, a_fork, an_exit,
        a_stream_that_outlives_the_patch, beside_the_process_s_own, a_pool_of_both, contexts_that_wander,
        settings_of_one, settings_that_change_during_calls,
    )
}  # fmt: skip


@contextmanager
def servers() -> Iterator[list[dict[str, Marked]]]:
    both: list[dict[str, Marked]] = [{name: Marked() for name in NAMES} for _ in range(2)]
    for kind in both:
        for name, server in kind.items():
            server.word = WORDS[name]
    try:
        yield both
    finally:
        for kind in both:
            for server in kind.values():
                server.close()


@pytest.fixture(scope="module")
def marked() -> Iterator[list[dict[str, Marked]]]:
    with servers() as both:
        yield both


CROSSED: dict[str, list[str]] = {}


@pytest.mark.parametrize("shared", [False, True], ids=["two stores", "one store"])
@pytest.mark.parametrize("name", ATTEMPTS)
def test_each_project_gets_its_own(name: str, shared: bool, bench: Any, marked: Any, tmp_path: Path):
    with ExitStack() as stack:
        two = Two(tmp_path, shared, marked, stack)
        try:
            bench.expects_faults = name == "scores of another process"
            ATTEMPTS[name](two)
            CROSSED[f"{name} {shared}"] = crossed = two.crossed()
        finally:
            art.unpatch()
            for kind in marked:
                for server in kind.values():
                    server.reset()
    assert crossed == []


def test_nothing_crossed(record_property: Any):
    found = [where for attempt in CROSSED.values() for where in attempt]
    what = f"attempts of two projects in one process that crossed, of {len(CROSSED)}"
    record_property("figure", [what, str(len(found)), "0"])
    assert found == []
