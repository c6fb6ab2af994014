"""The email example without a model: inbox, what is made up, what an answer is worth, the agent against a script."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.examples.load import load
from tests.support.servers import Answer, StubServer, completion, no_certificates, serving

MODULES = ("agent", "enron", "inbox", "make_questions", "questions", "rollout", "scenarios", "stand_in", "synthetic")
example = load("email_search", *MODULES)
Email, Inbox, Question = example.inbox.Email, example.inbox.Inbox, example.questions.Question

ZOE = Email("2024-03-01", "Zoe", "garden", "Let us meet about the garden on Friday, in the Green room.")
MAX = Email("2024-03-02", "Max", "garden", "Zoe's garden: not before Monday!")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    with no_certificates(tmp_path_factory.mktemp("none")), serving() as server:
        yield server


@pytest.fixture
def inbox() -> Iterator[Any]:
    inbox = Inbox()
    inbox.add([ZOE, MAX])
    yield inbox
    inbox.close()


def _calls(*calls: tuple[str, str]) -> Answer:
    made = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": made}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    return Answer(body=json.dumps(completion({"model": "m"}, choices=[choice])).encode())


def _says(content: str) -> Answer:
    return Answer(body=json.dumps(completion({"model": "m"}, content=content)).encode())


async def _answer(server: StubServer, inbox: Any, *script: Answer) -> list[Any]:
    server.reset()
    server.will(*script)
    async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        return await example.agent.answer(client, "m", inbox, "On which day?")


class TestInbox:
    def test_finds_all_words_newest_first(self, inbox: Any) -> None:
        assert inbox.search("zoe GARDEN") == [(2, MAX), (1, ZOE)]
        assert inbox.search("zoe green") == [(1, ZOE)]
        assert inbox.search("zoe yacht") == []

    @pytest.mark.parametrize("query", ["", '"', "_", "zoe AND", "sender:zoe*", "(", "NEAR(a b)", "'; DROP TABLE"])
    def test_whatever_is_searched_is_words(self, inbox: Any, query: str) -> None:
        assert inbox.search(query) == []

    def test_reads_by_number(self, inbox: Any) -> None:
        assert [inbox.read(number) for number in (1, 3, 10**30)] == [ZOE, None, None]

    @pytest.mark.parametrize(
        ("label", "number"), [("m017", 17), ("M17 ", 17), ("17", 17), ("m", None), ("m1 m2", None)]
    )
    def test_labels_are_read_leniently(self, label: str, number: int | None) -> None:
        assert example.inbox.number_of(label) == number


class TestMadeUp:
    def test_is_the_same_for_the_same_seed(self) -> None:
        made = [example.synthetic.make(seed, 60) for seed in ("1", "1", "2")]
        first, again, other = ([world.inbox.read(number) for number in range(1, 61)] for world in made)
        assert first == again != other
        assert None not in first
        asked = [[each.question for each in world.questions(9, "x")] for world in made]
        assert asked[0] == asked[1] != asked[2]
        for world in made:
            world.inbox.close()

    def test_examination_asks_what_no_lesson_knows(self) -> None:
        scenarios = example.scenarios.Synthetic(emails=60)
        held_out, lesson = scenarios.held_out(), scenarios.lesson(24, "0 0")
        assert (len(held_out), len(lesson)) == (96, 24)
        assert 2 <= sum(asked.question.answer is None for asked in held_out) <= 24
        is_held_out = example.synthetic.is_held_out
        mails = [lesson[0].inbox.read(number) for number in range(1, 61)]
        assert not any(is_held_out(mail.sender, mail.subject) for mail in mails)
        for asked in held_out:
            if asked.question.email is not None:
                mail = asked.inbox.read(asked.question.email)
                assert is_held_out(mail.sender, mail.subject)
                assert asked.question.answer in mail.body
        for asked in (*held_out, *lesson):
            asked.inbox.close()

    def test_too_many_mails_are_refused(self) -> None:
        with pytest.raises(ValueError, match="would do"):
            example.synthetic.make("0", 5000)

    def test_command_writes_inbox_and_questions(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        out = tmp_path / "inbox.db"
        monkeypatch.setattr("sys.argv", ["synthetic.py", "--emails", "50", "--questions", "10", "--out", str(out)])
        example.synthetic.main()
        own = example.scenarios.Own(out, out.with_suffix(".jsonl"))
        held_out, lesson = own.held_out(), own.lesson(100, "x")
        assert len(held_out) + len(lesson) == 10
        assert not {asked.question for asked in held_out} & {asked.question for asked in lesson}
        with pytest.raises(SystemExit):
            example.synthetic.main()
        for asked in (*held_out, *lesson):
            asked.inbox.close()

    def test_stand_in_asks_about_nothing_held_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(example.stand_in, "_INBOXES", 2)
        rng = random.Random(0)
        asked = [example.stand_in.beginner(rng)[1]["content"] for _ in range(200)]
        pairs = [(person, topic) for person in example.synthetic.PEOPLE for topic in example.synthetic.TOPICS]
        held_out = [pair for pair in pairs if example.synthetic.is_held_out(*pair)]
        assert not [text for text in asked for person, topic in held_out if f" {person} " in text and topic in text]


class TestReward:
    question = Question("On which day?", "Friday", 1, ("Monday", "Sunday"))
    unknown = Question("On which day?", None, None)

    @pytest.mark.parametrize(
        ("said", "right"),
        [("Friday", True), ("It is on friday.", True), ("Friday or Monday", False), ("Fridays", False), ("", False)],
    )
    def test_right_is_the_fact_and_no_other(self, said: str, right: bool) -> None:
        assert self.question.is_right(said) == right

    @pytest.mark.parametrize("said", ["I don't know", "I don\u2019t know.", "The inbox does not tell.", "Unknown"])
    def test_says_unknown(self, said: str) -> None:
        assert self.unknown.is_right(said)
        assert not self.question.is_right(said)

    def test_order_of_runs(self) -> None:
        reward = example.questions.reward
        runs = [
            reward(self.question, "Friday", read={1}, turns=3),
            reward(self.question, "Friday", read={1}, turns=6),
            reward(self.question, "Friday", read=set(), turns=1),
            reward(self.question, "I don't know", read={1}, turns=3),
            reward(self.question, "I don't know", read=set(), turns=3),
            reward(self.question, "Monday", read={1}, turns=3),
            reward(self.question, "Monday", read={2}, turns=3),
            reward(self.question, "", read={2}, turns=6),
        ]
        assert runs == sorted(runs, reverse=True)
        # Who did not look and says so has as much as who read the right mail and says something else.
        assert len({round(worth, 6) for worth in runs}) == len(runs) - 1
        assert reward(self.unknown, "I don't know", read=set(), turns=2) == 1
        assert reward(self.unknown, "Friday", read={2}, turns=3) == 0


class TestAgent:
    def test_searches_reads_and_answers(self, server: StubServer, inbox: Any) -> None:
        script = [
            _calls(("search_emails", '{"query": "Zoe garden"}')),
            _calls(("read_email", '{"id": "m001"}')),
            _says("On Friday. "),
        ]
        conversation = asyncio.run(_answer(server, inbox, *script))
        assert example.agent.final_answer(conversation) == "On Friday."
        assert example.agent.read_in(conversation) == {1}
        sent = server.seen[-1].body["messages"]
        assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool", "assistant", "tool"]
        assert sent[3]["content"] == "m002 Max: garden\nm001 Zoe: garden"
        assert sent[5]["content"] == f"2024-03-01, Zoe: garden\n{ZOE.body}"
        assert [call["function"]["name"] for call in sent[2]["tool_calls"]] == ["search_emails"]

    def test_bad_calls_are_answered(self, server: StubServer, inbox: Any) -> None:
        bad = [
            ("look", "{}"),
            ("read_email", "{"),
            ("read_email", '{"id": "x"}'),
            ("search_emails", '{"query": "yacht"}'),
        ]
        conversation = asyncio.run(_answer(server, inbox, _calls(*bad), _says("I don't know")))
        results = [message["content"] for message in server.seen[-1].body["messages"] if message["role"] == "tool"]
        assert [result[:8] for result in results] == ["Bad call", "Bad call", "There is", "No mail "]
        assert example.agent.read_in(conversation) == set()

    def test_gives_up(self, server: StubServer, inbox: Any) -> None:
        script = [_calls(("read_email", '{"id": 2}'))] * 9
        conversation = asyncio.run(_answer(server, inbox, *script))
        assert example.agent.final_answer(conversation) == ""
        assert len(server.seen) == example.agent.MAX_TURNS

    def test_rollout_is_judged(self, server: StubServer, inbox: Any) -> None:
        import art_patch as art

        asked = example.questions.Asked(inbox, Question("On which day?", "Friday", 1))
        model = art.Model(name="m", project="p", inference_base_url=server.url)

        async def run() -> art.Trajectory:
            server.reset()
            server.will(_calls(("read_email", '{"id": "m001"}')), _says("Friday"))
            try:
                return await example.rollout.rollout(model, asked)
            finally:
                await model.openai_client().close()

        found = asyncio.run(run())
        assert found.reward == 1.1
        assert found.metrics == {"right": True, "read_it": True, "gave_up": False, "turns": 2}


class TestEnron:
    RAW = (
        "Message-ID: <1@x>\nDate: Mon, 14 May 2001 16:39:00 -0700 (PDT)\nFrom: ann.lee@enron.com\n"
        "Subject: The pipeline\n\nIt opens on 3 June.\n"
    )
    NO_DATE = "From: Bob <bob@enron.com>\nSubject: a\n b\n\ncaf\u00e9\n"
    ANN = Email("2001-05-14 23:39", "ann.lee@enron.com", "The pipeline", "It opens on 3 June.")
    BOB = Email("", "bob@enron.com", "a b", "caf\u00e9")

    def test_maildir(self, tmp_path: Path) -> None:
        for place, raw in (("inbox/1.", self.RAW), ("all/7.", self.RAW), ("sent/1.", self.NO_DATE)):
            file = tmp_path / "maildir" / "lee-a" / place
            file.parent.mkdir(parents=True)
            file.write_text(raw, encoding="utf-8")
        mails = example.enron.load(tmp_path / "maildir")
        assert mails == [self.BOB, self.ANN]
        assert example.enron.write(mails, tmp_path / "out.db") == 2
        inbox = Inbox.existing(tmp_path / "out.db")
        assert inbox.search("pipeline june") == [(2, self.ANN)]
        inbox.close()

    def test_csv(self, tmp_path: Path) -> None:
        file = tmp_path / "emails.csv"
        file.write_text('file,message\na,"' + self.RAW + '"\n', encoding="utf-8")
        assert example.enron.load(file) == [self.ANN]

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="give a directory"):
            example.enron.load(tmp_path / "mails.zip")

    def test_questions_are_made_by_a_model(self, server: StubServer, inbox: Any) -> None:
        server.reset()
        server.always = _says('Sure: {"question": "On which day is the garden?", "answer": "Friday"}')

        async def make() -> list[Any]:
            async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
                return await example.make_questions.make(client, "m", inbox, 5, seed=0)

        assert asyncio.run(make()) == [Question("On which day is the garden?", "Friday", 1)]  # Max's mail has no Friday
