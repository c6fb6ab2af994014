"""A teacher over real HTTP: a model's log-probabilities of the tokens of a prompt, as vLLM echoes them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from art_patch.policies import load_model
from tests.support.families import logits_of
from tests.support.tiny import make_adapter_files
from tests.support.train_jobs import plain_model


def make_teacher(directory: Path, base: Path, *, seed: int) -> Path:
    """The base with a random LoRA merged into it: a model that a LoRA can come near to."""
    lora = make_adapter_files(directory / "lora", base, seed=seed, scale=0.3, rank=4)
    plain_model(base, lora).merge_and_unload().save_pretrained(directory)
    for file in base.iterdir():
        if file.suffix == ".jinja" or file.name.startswith("tokenizer"):
            shutil.copy(file, directory)
    return directory


@dataclass
class TeacherServer:
    """A running teacher."""

    url: str
    model: Any
    tokenizer: Any
    asked: list[tuple[int, ...]] = field(default_factory=list)  # the prompts
    headers: list[dict[str, str]] = field(default_factory=list)
    fails: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)  # status, text and headers of the next
    longest: int = 512
    echoes: bool = True

    def logprobs(self, ids: tuple[int, ...]) -> list[float]:
        """Of each token but the first, by transformers."""
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(logits_of(self.model, torch.tensor([ids]))[0].double(), -1)
        return [logprobs_TV[t - 1, ids[t]].item() for t in range(1, len(ids))]

    def answer(self, body: Any) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON and headers for a request's body."""
        ids = tuple(body["prompt"])
        self.asked.append(ids)
        if self.fails:
            status, text, headers = self.fails.pop(0)
            return status, {"error": {"message": text}}, headers
        if len(ids) > self.longest:
            return 400, {"error": {"message": f"maximum context length is {self.longest} tokens"}}, {}
        if max(ids) >= len(self.tokenizer):
            return 400, {"error": {"message": f"Token id {max(ids)} is out of vocabulary"}}, {}
        known = [None, *self.logprobs(ids)] if self.echoes and body["echo"] else []
        tokens = [self.tokenizer.decode([key]) for key in ids] if known else []
        logprobs = {"token_logprobs": [*known, -1.0], "tokens": [*tokens, "x"]}
        return 200, {"choices": [{"index": 0, "text": "x", "logprobs": logprobs}], "model": body["model"]}, {}


@contextmanager
def serve_teacher(base: Path) -> Generator[TeacherServer]:
    """Serve the model in `base`, with the tokenizer beside it, while the block runs."""
    lock = threading.Lock()  # a forward of one thread at a time

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/completions"
            with lock:
                teacher.headers.append({name.lower(): value for name, value in self.headers.items()})
                status, found, headers = teacher.answer(body)
            content = json.dumps(found).encode()
            self.send_response(status)
            for name, value in {
                "content-type": "application/json",
                "content-length": str(len(content)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    model = load_model(base, dtype=torch.float32).eval()
    teacher = TeacherServer(f"http://127.0.0.1:{server.server_port}/v1", model, AutoTokenizer.from_pretrained(base))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield teacher
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
