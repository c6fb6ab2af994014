"""The parts around vLLM that need no vLLM: command line, requests, environments, processes and their ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.asgi import ApiError
from art_patch.errors import ConfigError
from art_patch.serving import Found, VllmOptions, check_extra, check_rank, choose, gpus, share_out
from art_patch.serving.contract import EngineFull
from art_patch.serving.vllm import environment as environment_module
from art_patch.serving.vllm.engine import check_request, conversation_of, rows_of
from art_patch.serving.vllm.environment import find_vllm, look
from art_patch.serving.vllm.process import MARK, VllmProcess, command_line, mark, marked, sweep, variables_of
from art_patch.serving.vllm.replica import Occupancy
from tests.support.asking import wait_until

OPTIONS = VllmOptions(Path("/v/bin/python"), Path("/models/m"), "agent", model_type="qwen3")


def flags(line: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for word, after in zip(line, [*line[1:], "--end"], strict=True):
        if word.startswith("--"):
            found[word] = None if after.startswith("--") else after
    return found


def test_the_command_line_keeps_the_contract() -> None:
    line = command_line(OPTIONS, Path("/run/0.sock"))
    assert line[:3] == ["/v/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert flags(line) == {
        "--model": "/models/m", "--served-model-name": "agent@0", "--uds": "/run/0.sock", "--dtype": "auto",
        "--enable-lora": None, "--max-lora-rank": "16", "--max-loras": "4", "--max-cpu-loras": "16",
        "--logprobs-mode": "processed_logprobs", "--generation-config": "vllm", "--enable-auto-tool-choice": None,
        "--tool-call-parser": "hermes", "--shutdown-timeout": "20", "--disable-uvicorn-access-log": None,
        "--disable-fastapi-docs": None, "--enforce-eager": None, "--scheduling-policy": "priority",
        "--worker-extension-cls": "art_patch_cpu_loras.Extension",
    }  # fmt: skip


def test_a_gpu_is_not_held_back_and_the_users_own_arguments_come_last() -> None:
    options = replace(
        OPTIONS, device="cuda", gpu_memory_utilization=0.4, tensor_parallel_size=2, max_model_len=4096,
        tool_parser="xml", extra=("--quantization", "awq"),
    )  # fmt: skip
    line = command_line(options, Path("s"))
    assert line[-2:] == ["--quantization", "awq"]
    found = flags(line)
    assert "--enforce-eager" not in found
    assert (found["--gpu-memory-utilization"], found["--tensor-parallel-size"]) == ("0.4", "2")
    assert (found["--max-model-len"], found["--tool-call-parser"]) == ("4096", "xml")


@pytest.mark.parametrize(
    ("model_type", "parser"),
    [("qwen3_moe", "hermes"), ("llama", "llama3_json"), ("mistral3", "mistral"), ("x", "hermes")],
)
def test_the_tool_parser_goes_by_the_model(model_type: str, parser: str) -> None:
    assert flags(command_line(replace(OPTIONS, model_type=model_type), Path("s")))["--tool-call-parser"] == parser


@pytest.mark.parametrize(
    "extra",
    [["--host", "0.0.0.0"], ["--port=1"], ["--api-key", "x"], ["--logprobs_mode=raw_logprobs"], ["--lora-modules"]],
)
def test_what_the_contract_sets_cannot_be_given(extra: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{extra[0].partition('=')[0].replace('_', '-')} is set by art-patch serve"):
        check_extra(extra)


def test_ranks_are_those_that_vllm_knows() -> None:
    assert [check_rank(rank) for rank in (1, 2, 8, 9, 33, 512)] == [1, 8, 8, 16, 64, 512]
    with pytest.raises(ConfigError, match="from 1 to 512"):
        check_rank(513)


def test_the_environment_holds_what_the_contract_needs_and_no_secret_of_the_app() -> None:
    inherited = {
        "PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "7", "VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "k",
        "OPENAI_API_KEY": "sk-x", "ART_PATCH_STORE": "postgresql://u:p@h/d", "PYTHONPATH": "/app",
        "HF_HUB_OFFLINE": "0", "VLLM_LORA_RESOLVER_CACHE_DIR": "/adapters",
    }  # fmt: skip
    found = variables_of(OPTIONS, inherited, gpus=["3", "4"])
    assert [path.name for path in Path(found.pop("PYTHONPATH")).glob("*.py")] == ["art_patch_cpu_loras.py"]
    assert "PYTHONPATH" not in variables_of(replace(OPTIONS, device="cuda"), inherited)
    assert found == {
        "PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "7", "VLLM_SERVER_DEV_MODE": "0", "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_COMPUTE_NANS_IN_LOGITS": "1", "TRANSFORMERS_OFFLINE": "1",
        "SPT_NOENV": "1",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": "3,4",
    }  # fmt: skip


def test_a_request_is_refused_where_vllm_would_ignore_something() -> None:
    body: dict[str, Any] = {"model": "agent@1", "messages": [{"role": "user", "content": "x"}]}
    assert check_request({**body, "top_k": 5, "response_format": {"type": "json_object"}, "seed": None}) == "agent@1"
    assert check_request({**body, "store": False, "user": "u", "service_tier": "auto"}) == "agent@1"
    for change in ({"store": True}, {"web_search_options": {}}, {"model": ""}, {"model": 3}, {"messages": {}}):
        with pytest.raises(ApiError) as refusal:
            check_request({**body, **change})
        assert (refusal.value.status, refusal.value.param) == (400, next(iter(change)))


def metrics(running: int, waiting: int, took_s: float, ended: int) -> bytes:
    """As vLLM writes them: one line for each of its engines."""
    labels = '{engine="0",model_name="agent@0"}'
    return f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{labels} {running}.0
vllm:num_requests_waiting{labels} {waiting}.0
vllm:num_requests_waiting_by_reason{{reason="capacity"}} 77.0
vllm:request_inference_time_seconds_bucket{{le="0.3"}} 99.0
vllm:request_inference_time_seconds_count{labels} {ended}.0
vllm:request_inference_time_seconds_sum{labels} {took_s}
""".encode()


def is_full(vllm: Occupancy, rows: int, accepted_s: float | None) -> bool:
    try:
        vllm.check(rows, accepted_s)
    except EngineFull as error:
        assert 0 < error.retry_s <= 1
        return True
    return False


def test_a_vllm_is_full_when_others_wait_in_it() -> None:
    vllm = Occupancy()
    vllm.rows = 500
    assert not is_full(vllm, 1, 0.0)  # nothing has waited yet, so nobody knows how much it takes
    vllm.look(metrics(100, 40, 0.0, 0))
    assert is_full(vllm, 1, 2.0)  # how long it takes is not known
    assert not is_full(vllm, 1, None)
    vllm.look(metrics(100, 40, 50.0, 25))  # 2 s a row
    vllm.rows = 119
    # Its turn comes when 20 of 100 rows have ended.
    assert (is_full(vllm, 1, 0.39), is_full(vllm, 1, 0.41), is_full(vllm, 11, 0.41)) == (True, False, True)
    vllm.look(metrics(50, 69, 50.0, 25))  # longer prompts fill it earlier
    assert is_full(vllm, 1, 0.41)
    vllm.rows = 90
    vllm.look(metrics(90, 0, 50.0, 25))  # none waits: it takes at least these
    assert (is_full(vllm, 0, 0.0), is_full(vllm, 1, 0.0)) == (False, True)
    vllm.rows = 10
    vllm.look(metrics(0, 0, 0.5, 1))  # it was started again and counts from 0
    assert not is_full(vllm, 8, 0.0)


def test_requests_of_the_job_leave_their_room_to_others() -> None:
    assert [rows_of(fields) for fields in ({}, {"n": 3}, {"n": None}, {"n": 3, "priority": 100}, {"priority": -1})] == [
        1, 3, 1, 0, 1,
    ]  # fmt: skip


def test_a_conversation_is_what_all_of_its_calls_begin_with() -> None:
    opening = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    later = [*opening, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
    assert conversation_of({"messages": opening}) == conversation_of({"messages": later})
    assert conversation_of({"messages": opening}) != conversation_of({"messages": opening[:1]})


# Processes.


@pytest.fixture
def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != MARK}


FAMILY = [sys.executable, "-c", "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"]
"""A process with a child, as vLLM is one; with its guard they are three."""


@contextmanager
def running(command: list[str], home: Path, environment: dict[str, str]) -> Iterator[VllmProcess]:
    process = VllmProcess(command, environment, log=home / "log", home=home)
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize("victim", ["guard", "parent", "child"])
def test_no_end_of_a_process_leaves_another(victim: str, tmp_path: Path, clean_environment: dict[str, str]) -> None:
    with running(FAMILY, tmp_path, clean_environment) as process:
        wait_until(lambda: len(marked(tmp_path)) == 3)
        guard, parent, child = sorted(marked(tmp_path))
        os.kill({"guard": guard, "parent": parent, "child": child}[victim], signal.SIGKILL)
        if victim == "child":
            assert process.alive(), "whether it can live without that child is its own affair"
            process.terminate()
        wait_until(lambda: not process.alive())
        wait_until(lambda: marked(tmp_path) == [])


def test_the_end_of_the_server_is_the_end_of_all(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from art_patch.serving.vllm.process import VllmProcess, marked
process = VllmProcess({FAMILY!r}, dict(os.environ), log=Path({str(tmp_path)!r}) / "log", home=Path({str(tmp_path)!r}))
while len(marked(Path({str(tmp_path)!r}))) < 3: time.sleep(0.01)
print("up", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=clean_environment) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        server.kill()
    wait_until(lambda: marked(tmp_path) == [])


def test_what_a_dead_server_left_is_swept_and_what_a_living_one_runs_is_not(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    # As if server and guard had been killed at the same moment.
    left = subprocess.Popen(["sleep", "60"], env={**clean_environment, MARK: f"{tmp_path}:999999999-1"})
    ours = subprocess.Popen(["sleep", "60"], env={**clean_environment, MARK: mark(tmp_path)})
    other = subprocess.Popen(["sleep", "60"], env={**clean_environment, MARK: f"{tmp_path}-2:999999999-1"})
    try:
        wait_until(lambda: len(marked(tmp_path)) == 2)
        assert sweep(tmp_path) == 1
        assert left.wait(5) == -signal.SIGKILL
        assert (ours.poll(), other.poll()) == (None, None)
        assert sweep(tmp_path) == 0
    finally:
        for process in (left, ours, other):
            process.kill()
            process.wait()


def test_the_last_words_are_the_root_of_the_trouble(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    (tmp_path / "log").write_text("ValueError: of yesterday\n")
    code = "print('x'); print('RuntimeError: no memory'); print('a.b.EngineDeadError: dead'); raise SystemExit(1)"
    with running([sys.executable, "-c", code], tmp_path, clean_environment) as process:
        wait_until(lambda: not process.alive())
        assert process.last_words() == "RuntimeError: no memory"
    with running([sys.executable, "-c", "print('bye')"], tmp_path, clean_environment) as quiet:
        wait_until(lambda: not quiet.alive())
        assert quiet.last_words() == "bye\nvLLM ended with exit code 0"


def test_sigterm_is_handed_on(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    code = "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(0.3), print('drained'), sys.exit(0)))\n"
    code += "print('up', flush=True)\ntime.sleep(60)"
    with running([sys.executable, "-c", code], tmp_path, clean_environment) as process:
        wait_until(lambda: (tmp_path / "log").read_text() == "up\n")  # unbuffered, word and line end come apart
        process.terminate()
        wait_until(lambda: not process.alive())
        assert (tmp_path / "log").read_text() == "up\ndrained\nvLLM ended with exit code 0\n"


# Environments and the choice between engines.


def fake_python(directory: Path, **versions: str) -> Path:
    """An interpreter whose environment holds these distributions."""
    directory.mkdir(parents=True)
    path = directory / "python"
    path.write_text(f"#!/bin/sh\necho '{json.dumps(versions)}'\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_is_looked_at(tmp_path: Path) -> None:
    cpu = fake_python(tmp_path / "cpu", **{"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"})
    assert look(cpu) == Found(cpu, {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"})
    official = fake_python(tmp_path / "official", vllm="0.32.0+cpu", torch="2.13.0")
    cuda = fake_python(tmp_path / "cuda", vllm="0.33.0", torch="2.13.0")
    assert [found.device for path in (cpu, official, cuda) if (found := look(path))] == ["cpu", "cpu", "cuda"]
    assert look(fake_python(tmp_path / "none", torch="2.13.0")) is None
    assert look(tmp_path / "nowhere") is None
    with pytest.raises(ConfigError, match="has no vLLM"):
        find_vllm(tmp_path / "nowhere", tmp_path)
    assert find_vllm(None, tmp_path) is None


def test_gpus_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: x)'\necho 'GPU 1: NVIDIA H200 (UUID: y)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpus() == ["0", "1"]


@pytest.mark.parametrize(
    ("kind", "device", "here", "built", "engine", "why"),
    [
        ("auto", "auto", [], None, "embedded", "no GPU"),
        ("auto", "auto", [], "cpu", "embedded", "no GPU"),
        ("auto", "auto", ["0"], None, "embedded", "a GPU is here, but no vLLM for it; build its environment"),
        ("auto", "auto", ["0"], "cpu", "embedded", "a GPU is here, but no vLLM for it; build its environment"),
        ("auto", "auto", ["0", "1"], "cuda", "vllm", r"vLLM 0\.33\.0 on 2 GPU"),
        ("auto", "cpu", ["0"], "cuda", "embedded", "--device cpu"),
        ("vllm", "auto", [], "cpu", "vllm", r"vLLM 0\.33\.0 on cpu"),
        ("vllm", "cuda:1", ["0", "1"], "cuda", "vllm", r"vLLM 0\.33\.0 on cuda"),
        ("embedded", "auto", ["0"], "cuda", "embedded", "asked for"),
        ("vllm", "auto", [], None, ConfigError, "there is no vLLM; build its environment"),
        ("vllm", "auto", [], "cuda", ConfigError, "is a build for GPUs, and none is here"),
        ("vllm", "cuda", ["0"], "cpu", ConfigError, "is a build for CPUs"),
        ("auto", "cuda:3", ["0"], "cuda", ConfigError, "--device cuda:3: 1 GPUs are here"),
        ("tgi", "auto", [], None, ConfigError, "--engine tgi is unknown"),
    ],
)  # fmt: skip
def test_the_choice_and_its_reason(
    kind: str, device: str, here: list[str], built: str | None, engine: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"cpu": {"vllm-cpu": "0.33.0"}, "cuda": {"vllm": "0.33.0"}}
    found = None if built is None else Found(Path("python"), versions[built])
    monkeypatch.setattr(environment_module, "gpus", lambda: list(here))
    monkeypatch.setattr(environment_module, "find_vllm", lambda *_: found)
    if engine is ConfigError:
        with pytest.raises(ConfigError, match=why):
            choose(kind, device, python=None, environments=Path("x"))
        return
    chosen = choose(kind, device, python=None, environments=Path("x"))
    assert ("vllm" if chosen.vllm else "embedded") == engine
    assert re.match(why, chosen.why)
    if device == "cuda:1":
        assert chosen.gpus == ["1"]


def test_gpus_are_shared_out() -> None:
    assert share_out(["0", "1", "2", "3", "4"], 2, 2) == [["0", "1"], ["2", "3"]]
    with pytest.raises(ConfigError, match="needs 6 GPUs, not 5"):
        share_out(["0", "1", "2", "3", "4"], 3, 2)


def test_half_an_environment_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_module, "gpus", list)
    directory = environment_module.home_of(tmp_path, "cpu")
    fake_python(directory / "bin", **{"vllm-cpu": "0.32.0"})
    assert find_vllm(None, tmp_path) is None
    (directory / "art-patch.json").write_text("{}")
    assert find_vllm(None, tmp_path) == Found(directory / "bin" / "python", {"vllm-cpu": "0.32.0"})
