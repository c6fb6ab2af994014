"""A teacher is asked for log-probabilities of tokens, over real HTTP."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from art_patch.errors import ConfigError, JudgeError
from art_patch.pipeline import TeacherJudge
from art_patch.policies import load_model
from art_patch.rewards import Budget, BudgetUsedUp, Teacher
from art_patch.serving.vllm.process import VllmOptions, VllmProcess, variables_of
from tests.support.engines import vllm_python
from tests.support.teachers import TeacherServer, serve_teacher
from tests.support.tiny import make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

IDS = (5, 6, 7, 300, 12)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=7, hidden=32, vocab_size=320)


@pytest.fixture
def server(other: Path) -> Iterator[TeacherServer]:
    with serve_teacher(other) as running:
        yield running


def of(server: TeacherServer, **more) -> Teacher:
    return Teacher("big", server.url, **more)


def test_log_probabilities_are_the_models_own_and_asked_once(server: TeacherServer):
    teacher = of(server)
    assert not teacher.knows(IDS)
    found = teacher.logprobs(IDS)
    assert list(found) == pytest.approx([0.0, *server.logprobs(IDS)], abs=1e-6)
    assert teacher.knows(IDS) and teacher.logprobs(IDS) == found
    assert server.asked == [IDS]


def test_the_key_is_the_teachers_own_and_in_no_message(server: TeacherServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-provider")
    of(server).logprobs(IDS)
    server.fails.append((401, "Incorrect API key provided: sk-mine-123", {}))
    with pytest.raises(JudgeError, match=r"the teacher big at 127\.0\.0\.1:.* did not answer") as raised:
        of(server, api_key="sk-mine-123").logprobs(IDS)
    assert "sk-mine-123" not in str(raised.value) and "ART_PATCH_TEACHER_API_KEY" in str(raised.value)
    assert [sent["authorization"] for sent in server.headers] == ["Bearer none", "Bearer sk-mine-123"]


def test_what_passes_is_tried_again_and_what_does_not_is_told(server: TeacherServer):
    server.fails += [(503, "busy", {"retry-after": "0.01"}), (429, "slower", {"retry-after": "0.01"})]
    assert len(of(server).logprobs(IDS)) == len(IDS)
    server.fails.append((307, "elsewhere", {"location": "http://127.0.0.1:9/v1/completions"}))
    with pytest.raises(JudgeError, match="did not answer"):
        of(server).logprobs(IDS)
    server.echoes = False
    with pytest.raises(JudgeError, match="must have `echo` with `logprobs`"):
        of(server).logprobs(IDS)
    with pytest.raises(JudgeError, match="did not answer"):
        Teacher("big", "http://127.0.0.1:9/v1", max_retries=0).logprobs(IDS)


def test_a_row_that_it_refuses_is_left_out_with_its_words(server: TeacherServer):
    server.longest = 4
    assert "maximum context length is 4 tokens" in str(of(server).logprobs(IDS))


def test_calls_have_a_limit_and_dollars_have_none(server: TeacherServer):
    budget = Budget(max_calls=1)
    teacher = of(server, budget=budget)
    server.longest = 4
    teacher.logprobs(IDS)  # refused, so nothing was used up
    teacher.logprobs(IDS[:3])
    with pytest.raises(BudgetUsedUp, match="1 of 1 calls"):
        teacher.logprobs(IDS[:2])
    with pytest.raises(ConfigError, match="--max-calls"):
        of(server, budget=Budget(max_usd=1.0))


def test_another_tokenizer_is_refused(server: TeacherServer, base: Path, tmp_path: Path):
    TeacherJudge(of(server), max_tokens=64).require_same_tokens(str(base))
    smaller = make_tiny_model(tmp_path / "smaller", hidden=32, vocab_size=310)  # the special tokens come earlier
    with pytest.raises(ConfigError, match=r"has another tokenizer than .*: token 30"):
        TeacherJudge(of(server), max_tokens=64).require_same_tokens(str(smaller))
    larger = make_tiny_model(tmp_path / "larger", hidden=32, vocab_size=336)
    with pytest.raises(ConfigError, match="out of vocabulary; it needs the same tokenizer"):
        TeacherJudge(of(server), max_tokens=64).require_same_tokens(str(larger))
    server.longest = 4
    with pytest.raises(ConfigError, match="cannot read the tokens of"):
        TeacherJudge(of(server), max_tokens=64).require_same_tokens(str(base))


@pytest.mark.vllm
def test_vllm_gives_what_transformers_computes(other: Path, base: Path, tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = VllmOptions(vllm_python(), other, "big", threads=1)
    command = [
        str(options.python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(other),
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1", "--served-model-name", "big", "--dtype", "float32", "--enforce-eager"]
    process = VllmProcess(command, variables_of(options, os.environ), log=tmp_path / "log", home=tmp_path)
    teacher = Teacher("big", f"http://127.0.0.1:{port}/v1", max_retries=0)
    ids = tuple(random.Random(0).randrange(311) for _ in range(200))
    try:
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.alive(), process.last_words()
            time.sleep(0.5)
        TeacherJudge(teacher, max_tokens=64).require_same_tokens(str(base))
        model = load_model(other, dtype=torch.float32).eval()
        logprobs_TV = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        expected = [logprobs_TV[t - 1, ids[t]].item() for t in range(1, len(ids))]
        assert list(teacher.logprobs(ids)) == pytest.approx([0.0, *expected], abs=1e-3)
        refused = teacher.logprobs((5,) * 2000)
        assert isinstance(refused, str) and "1024" in refused  # its context
        with pytest.raises(JudgeError, match="does not exist"):
            Teacher("small", f"http://127.0.0.1:{port}/v1").logprobs(ids)
        with pytest.raises(ConfigError, match="tokenizer"):
            smaller = make_tiny_model(tmp_path / "smaller", hidden=32, vocab_size=310)
            TeacherJudge(teacher, max_tokens=64).require_same_tokens(str(smaller))
    finally:
        process.kill()
