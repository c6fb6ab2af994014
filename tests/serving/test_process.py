"""The server as a process: signals, and what the light modules import."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from threading import Thread

SERVE = """
import sys, threading, torch
torch.set_num_threads(1)
from art_patch.serving.embedded.engine import EmbeddedEngine
from art_patch.serving.server import run_server
engine = EmbeddedEngine.from_pretrained(sys.argv[1], adapters_root=sys.argv[2])
stop = threading.Event()
threading.Thread(target=lambda: (stop.wait(), print("ends", flush=True)), daemon=True).start()
run_server(engine, port=0, on_ready=lambda url: print(url, flush=True), stop=stop)
print("returned", engine.healthy, flush=True)
"""


def test_sigterm_finishes_what_runs_and_returns(base_dir: Path, adapters: Path) -> None:
    command = [sys.executable, "-c", SERVE, str(base_dir), str(adapters)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        body = {"model": "agent@0", "messages": [{"role": "user", "content": "plum"}], "max_tokens": 400}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.readline()  # it runs
            process.send_signal(signal.SIGTERM)
            # Threads that ask this server learn that it ends before it refuses them.
            assert process.stdout.readline() == "ends\n"
            text = response.read().decode()
        assert text.count("token_ids") == 400
        assert text.endswith("data: [DONE]\n\n")
        watchdog = Thread(target=process.wait, args=(60,))
        watchdog.start()
        assert process.stdout.readline() == "returned False\n"
        watchdog.join()
        assert process.returncode == 0


def test_what_the_job_imports_needs_neither_torch_nor_transformers() -> None:
    code = """
import sys
import art_patch.policies.validation, art_patch.serving.contract, art_patch.serving.contract
import art_patch.serving.embedded.text
print(sorted({"torch", "transformers", "peft", "starlette", "uvicorn", "openai"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
