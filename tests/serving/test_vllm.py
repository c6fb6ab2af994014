"""Real vLLM processes: killed, poisoned, swapped and drained while callers talk to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from art_patch.errors import AdapterRejected, EngineError
from art_patch.policies import base_fingerprint, publish_adapter
from art_patch.serving.vllm import engine as engine_module
from art_patch.serving.vllm.process import marked
from art_patch.serving.vllm.replica import Replica
from art_patch.types import WAIT_HEADER
from tests.support.asking import HELLO, PROOF, ask, assembled, greedy, wait_until
from tests.support.engines import Running, make_vllm, serve, vllm_python
from tests.support.tiny import make_adapter_files

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "stream": True}
ON_AND_ON = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def running(base_dir: Path, adapters: Path, home: Path) -> Iterator[Running]:
    """Two replicas with two policies."""
    engine = make_vllm(base_dir, adapters, home, replicas=2)
    with serve(engine, policies=["agent@1", "agent@2"], ready_s=240) as server:
        yield server
    wait_until(lambda: marked(home) == [], 10)  # what is killed takes a moment to be gone


@pytest.fixture
def whole(running: Running) -> Running:
    """Both replicas take requests."""
    wait_until(lambda: all(replica.ready for replica in running.engine.replicas), 120)
    return running


def processes(home: Path) -> dict[str, list[int]]:
    """The guards, API servers and engines that run, by what they are."""
    found: dict[str, list[int]] = {"guard": [], "server": [], "engine": []}
    for pid in marked(home):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            kinds = {"guard": b"group_guard.py", "engine": b"EngineCore", "server": b"openai.api_server"}
            for kind in (kind for kind, part in kinds.items() if part in line):
                found[kind].append(pid)
                break
    return found


def stubborn(client: OpenAI, policy: str, content: str) -> list[int] | int:
    """What a caller gets: the ids of a greedy answer, or the status with which it is sent to its provider."""
    try:
        return greedy(client, policy, content)
    except openai.APIStatusError as error:
        return error.status_code


def test_replicas_share_conversations_and_each_stays_where_it_is(whole: Running) -> None:
    engine = whole.engine
    beginnings = [f"conversation {number}".encode() for number in range(200)]
    chosen = [engine.choose(beginning).number for beginning in beginnings]
    assert [engine.choose(beginning).number for beginning in beginnings] == chosen
    assert 60 < chosen.count(0) < 140
    first, second = engine.replicas
    second.running += 100
    try:
        assert {engine.choose(beginning) for beginning in beginnings} == {first}, "but not where work piles up"
    finally:
        second.running -= 100


def test_a_full_vllm_says_so_and_goes_on(base_dir: Path, adapters: Path, home: Path) -> None:
    engine = make_vllm(base_dir, adapters, home / "full", extra=("--max-num-seqs", "2"))
    with serve(engine, ready_s=600) as server, ThreadPoolExecutor(12) as pool:

        def asked(**headers: str) -> int:
            try:
                answer = ask(server.openai, max_tokens=8, extra_headers=headers, extra_body=ON_AND_ON)
            except openai.RateLimitError as error:
                assert error.code == "engine_full"
                return 429
            return len(answer["choices"])

        assert asked(**{WAIT_HEADER: "0"}) == 1
        running = [pool.submit(ask, server.openai, max_tokens=500, extra_body=ON_AND_ON) for _ in range(12)]
        wait_until(lambda: engine.replicas[0].occupancy._most == 2)
        assert asked(**{WAIT_HEADER: "0"}) == 429
        assert asked() == 1
        assert all(answer.result()["choices"] for answer in running)
        assert engine.replicas[0].occupancy.rows == 0
        assert asked(**{WAIT_HEADER: "0"}) == 1


@pytest.mark.parametrize(
    "victim", ["engine", *(pytest.param(name, marks=pytest.mark.full) for name in ("server", "guard"))]
)
def test_a_killed_replica_comes_back_with_every_policy(whole: Running, home: Path, victim: str) -> None:
    expected = {policy: greedy(whole.openai, policy, "pear") for policy in ("agent@0", "agent@1", "agent@2")}
    assert len({tuple(ids) for ids in expected.values()}) == 3
    before = processes(home)
    assert {kind: len(pids) for kind, pids in before.items()} == {"guard": 2, "server": 2, "engine": 2}
    os.kill(before[victim][0], signal.SIGKILL)
    wait_until(lambda: not all(replica.ready for replica in whole.engine.replicas))
    # The other one serves meanwhile; whoever was being answered is answered again there.
    jobs = [(policy, f"plum {number}") for number in range(4) for policy in expected]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda job: stubborn(whole.openai, *job), jobs))
    assert all(isinstance(answer, list) for answer in answers)
    wait_until(lambda: all(replica.ready for replica in whole.engine.replicas), 120)
    after = processes(home)
    assert {kind: len(pids) for kind, pids in after.items()} == {"guard": 2, "server": 2, "engine": 2}
    for policy, ids in expected.items():
        for text in ("pear", "pear"):
            assert greedy(whole.openai, policy, text) == ids


def test_a_stream_whose_replica_dies_breaks_off(whole: Running, home: Path) -> None:
    stream = whole.openai.chat.completions.create(
        model="agent@1", messages=HELLO, **{**LONG, "max_tokens": 900}, extra_body=ON_AND_ON
    )
    next(stream)
    busy = next(replica for replica in whole.engine.replicas if replica.running)
    os.killpg(busy._process.pid, signal.SIGKILL)
    with pytest.raises(Exception, match=r"incomplete|peer closed|EngineCore|terminated"):
        for _ in stream:
            pass


def test_policies_come_and_go_under_streams(whole: Running) -> None:
    stop, errors = threading.Event(), list[BaseException]()
    expected = greedy(whole.openai, "agent@1", "pear", 60)

    def talk() -> int:
        count = 0
        while not stop.is_set():
            try:
                chunks = whole.openai.chat.completions.create(
                    model="agent@1", messages=[{"role": "user", "content": "pear"}], temperature=0, max_tokens=60,
                    stream=True, **PROOF,
                )  # fmt: skip
                assert assembled(chunks)["choices"][0]["ids"] == expected
                count += 1
            except BaseException as error:
                errors.append(error)
                return count
        return count

    with ThreadPoolExecutor(6) as pool:
        talkers = [pool.submit(talk) for _ in range(6)]
        try:
            for _ in range(3):
                for name in ("agent@3", "agent@4"):
                    whole.client.load(name)
                    assert greedy(whole.openai, name, "pear", 60) != expected
                    whole.client.unload(name)
        finally:
            stop.set()
        assert all(talker.result() > 0 for talker in talkers)
    assert errors == []


def test_the_base_answers_as_itself_beside_policies(whole: Running) -> None:
    for name in ("agent@3", "agent@4"):  # with them every place that vLLM has for LoRAs was taken once
        whole.client.load(name)
        greedy(whole.openai, name, "pear", 4)
        whole.client.unload(name)
    expected, stop = greedy(whole.openai, "agent@0", "pear", 60), threading.Event()

    def talk() -> None:
        while not stop.is_set():
            greedy(whole.openai, "agent@1", "pear", 60)

    with ThreadPoolExecutor(3) as pool:
        talkers = [pool.submit(talk) for _ in range(3)]
        try:
            answers = [greedy(whole.openai, "agent@0", "pear", 60) for _ in range(5)]
        finally:
            stop.set()
        for talker in talkers:
            talker.result()
    assert answers == [expected] * 5


def spoil_scaling(work: Path, probe: dict[str, Any]) -> dict[str, Any]:
    config = work / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 16'))
    return probe


@pytest.fixture(scope="module")
def trained(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[str, Any]]:
    """The probe that a trainer would write for an adapter's files."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def probe(work: Path) -> dict[str, Any]:
        ids = list(range(100, 130))

        def logprobs(model: Any) -> Any:
            with torch.no_grad():
                return torch.log_softmax(model.eval()(input_ids=torch.tensor([ids])).logits[0, :-1], dim=-1)

        base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
        without = logprobs(base)
        tuned = logprobs(PeftModel.from_pretrained(base, str(work)))
        targets = tuned.argmax(dim=-1, keepdim=True)
        tuned, without = (each.gather(1, targets).squeeze(1).tolist() for each in (tuned, without))
        return {
            "token_ids": ids, "target_ids": targets.squeeze(1).tolist(), "logprobs": tuned, "base_logprobs": without,
            "dtype": "float32",
        }  # fmt: skip

    return probe


def test_what_the_trainer_computed_is_what_is_served(
    whole: Running, base_dir: Path, adapters: Path, trained: Callable[[Path], dict[str, Any]]
) -> None:
    work = make_adapter_files(adapters / "work-probe", base_dir, seed=31)
    extra = {"probe": trained(work)}
    publish_adapter(work, adapters / "agent@31", base_sha256=base_fingerprint(base_dir), extra=extra)
    stop = threading.Event()

    def talk() -> None:
        while not stop.is_set():
            ask(whole.openai, "agent@1", max_tokens=30, temperature=1, n=3)

    with ThreadPoolExecutor(4) as pool:  # a proof must not disturb what runs beside it, nor be disturbed
        talkers = [pool.submit(talk) for _ in range(4)]
        try:
            whole.client.load("agent@31")
        finally:
            stop.set()
        assert [talker.result() for talker in talkers] == [None] * 4
    assert "agent@31" in whole.client.models()
    whole.client.unload("agent@31")


@pytest.mark.parametrize(
    ("step", "change", "reason"),
    [
        (32, spoil_scaling, "nats from the trainer's"),
        (33, lambda _, probe: {**probe, "logprobs": probe["base_logprobs"]}, "nats from the trainer's"),
    ],
)
def test_an_adapter_that_computes_something_else_never_serves(
    whole: Running,
    base_dir: Path,
    adapters: Path,
    trained: Callable[[Path], dict[str, Any]],
    step: int,
    change: Callable[[Path, dict[str, Any]], dict[str, Any]],
    reason: str,
) -> None:
    expected = greedy(whole.openai, "agent@1", "pear")
    work = make_adapter_files(adapters / f"work-{step}", base_dir, seed=step)
    extra = {"probe": change(work, trained(work))}
    publish_adapter(work, adapters / f"agent@{step}", base_sha256=base_fingerprint(base_dir), extra=extra)
    with pytest.raises(AdapterRejected, match=reason):
        whole.client.load(f"agent@{step}")
    assert f"agent@{step}" not in whole.client.models()
    assert stubborn(whole.openai, f"agent@{step}", "pear") == 404
    assert greedy(whole.openai, "agent@1", "pear") == expected
    assert all(replica.ready for replica in whole.engine.replicas), "a wrong adapter is no reason to start again"


def test_a_policy_that_poisons_one_replica_is_refused_and_the_replica_replaced(
    whole: Running, base_dir: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks before loading would stop it; here they are left out."""
    import torch
    from safetensors.torch import load_file, save_file

    expected = greedy(whole.openai, "agent@1", "pear")
    work = make_adapter_files(adapters / "work-nan", base_dir, seed=41)
    weights = {name: torch.full_like(tensor, float("nan")) for name, tensor in load_file(work / WEIGHTS).items()}
    publish_adapter(work, adapters / "agent@41", base_sha256=base_fingerprint(base_dir))
    save_file(weights, adapters / "poison.safetensors")
    poison = (adapters / "poison.safetensors").read_bytes()
    real = engine_module.validate_adapter

    def unchecked(*arguments: Any, **options: Any) -> Any:
        from dataclasses import replace

        return replace(real(*arguments, **options), weights=poison)

    monkeypatch.setattr(engine_module, "validate_adapter", unchecked)
    with pytest.raises(AdapterRejected, match="not finite"):
        whole.client.load("agent@41")
    assert [greedy(whole.openai, "agent@1", "pear") for _ in range(5)] == [expected] * 5
    wait_until(lambda: sum(replica.restarts for replica in whole.engine.replicas) > 0)
    wait_until(lambda: all(replica.ready for replica in whole.engine.replicas), 120)
    assert [greedy(whole.openai, "agent@1", "pear") for _ in range(5)] == [expected] * 5


WEIGHTS = "adapter_model.safetensors"


def test_bad_adapters_are_refused_before_vllm_hears_of_them(
    whole: Running, base_dir: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.broken_adapters import BEFORE_PUBLISHING

    asked: list[str] = []
    real = Replica.load

    async def load(self: Replica, policy: Any) -> None:
        asked.append(policy.name)
        await real(self, policy)

    monkeypatch.setattr(Replica, "load", load)
    fingerprint = base_fingerprint(base_dir)
    for step, (spoil, reason) in enumerate(BEFORE_PUBLISHING.values(), start=5000):
        work = make_adapter_files(adapters / f"work{step}", base_dir)
        spoil(work)
        publish_adapter(work, adapters / f"bad@{step}", base_sha256=fingerprint)
        with pytest.raises(AdapterRejected) as refusal:
            whole.client.load(f"bad@{step}")
        assert reason.replace("ranks 1 to 64", "ranks 1 to 16") in str(refusal.value)
    assert asked == []


def test_only_what_the_contract_names_reaches_vllm(whole: Running) -> None:
    for path in ("/adapters", "/invocations", "/tokenize", "/metrics", "/completions", "/responses", "/lora"):
        with pytest.raises(openai.NotFoundError):
            whole.openai.post(path, body={"model": "agent@0", "name": "x", "src": "/etc"}, cast_to=object)
    for model in ("/etc/passwd", "../agent@1", "agent@1/..", "agent"):
        assert stubborn(whole.openai, model, "pear") == 404
    for change, param in (
        ({"store": True}, "store"),
        ({"never_heard_of": 1}, "never_heard_of"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"messages": []}, "messages"),
        ({"guided_json": {}}, "guided_json"),
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            whole.openai.post(
                "/chat/completions", body={"model": "agent@0", "messages": HELLO, **change}, cast_to=object
            )
        assert refusal.value.body["param"] == param
    with pytest.raises(openai.BadRequestError, match=r"maximum context length|max_tokens"):
        ask(whole.openai, max_tokens=5000)


SERVE = [sys.executable, "-m", "art_patch", "serve", "--engine", "vllm", "--port", "0", "--json", "--threads", "1"]


@pytest.fixture
def started(base_dir: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """`art-patch serve` as a process, its address, and the directory of its vLLM."""
    import json

    command = [*SERVE, "--base", str(base_dir), "--home", str(tmp_path), "--project", "p", "--max-model-len", "1024"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "ART_PATCH_VLLM_PYTHON": str(vllm_python())}
    )
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    assert said["engine"] == "vllm"
    yield process, said["base_url"], tmp_path / "p" / "vllm"
    process.kill()
    process.wait()
    process.stdout.close()


def test_sigterm_finishes_what_runs_and_leaves_nothing(started: tuple[subprocess.Popen[str], str, Path]) -> None:
    process, url, home = started
    assert len(marked(home)) >= 3
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        stream = client.chat.completions.create(model="agent@0", messages=HELLO, **LONG, extra_body=ON_AND_ON)
        first = next(stream)
        process.send_signal(signal.SIGTERM)
        assert len(assembled([first, *stream])["choices"][0]["ids"]) == 400
    assert process.wait(60) == 0
    wait_until(lambda: marked(home) == [], 10)
    assert [path.name for path in home.iterdir()] == ["vllm-0.log"], "the copies of adapters are gone"


def test_a_killed_server_leaves_nothing(started: tuple[subprocess.Popen[str], str, Path]) -> None:
    process, _, home = started
    process.kill()
    process.wait()
    wait_until(lambda: marked(home) == [], 10)


def test_a_vllm_that_cannot_start_is_a_clear_error(base_dir: Path, adapters: Path, tmp_path: Path) -> None:
    engine = make_vllm(base_dir, adapters, tmp_path, max_model_len=1 << 30)
    with pytest.raises(EngineError, match=r"(?s)vLLM did not start \(it ended\).*vllm-0\.log says:\n.*max_model_len"):
        with serve(engine, ready_s=120):
            pass
    wait_until(lambda: marked(tmp_path) == [], 10)
