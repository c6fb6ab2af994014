"""What every engine promises (`art_patch.serving.contract`), over HTTP: a test class for any engine that runs."""

from __future__ import annotations

import json
import math
import shutil
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from art_patch.errors import AdapterRejected, EngineError
from art_patch.policies import base_fingerprint, publish_adapter
from tests.support.asking import HELLO, LOOKUP_TOOL, PROOF, ask, assembled, greedy
from tests.support.broken_adapters import AFTER_PUBLISHING, BEFORE_PUBLISHING
from tests.support.engines import ADMIN_KEY, Running
from tests.support.tiny import make_adapter_files, make_tiny_adapter

LOADED = ["agent@1", "agent@2"]


class EngineContract:
    """One engine, over HTTP. Who inherits has two fixtures: its `running` server, and the `tolerance` in nats."""

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer(cls, base_dir: Path) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(base_dir)

    @pytest.fixture(scope="class")
    @classmethod
    def plain_logprobs(cls, base_dir: Path, adapters: Path) -> Callable[..., list[float]]:
        """The plain way to the log-probabilities of sampled tokens: transformers and PEFT, no cache, no batch."""

        @cache
        def model(policy: str) -> Any:
            from peft import PeftModel
            from transformers import AutoModelForCausalLM

            base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
            return base if policy == "agent@0" else PeftModel.from_pretrained(base, str(adapters / policy))

        def logprobs(policy: str, prompt: list[int], sampled: list[int], temperature: float) -> list[float]:
            with torch.no_grad():
                logits = model(policy).eval()(input_ids=torch.tensor([prompt + sampled])).logits[0]
            found = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
            return found.gather(1, torch.tensor(sampled).unsqueeze(1)).squeeze(1).tolist()

        return logprobs

    def test_what_must_be_in_a_whole_answer(self, running: Running, tokenizer: Any) -> None:
        answer = ask(
            running.openai,
            "agent@1",
            max_tokens=6,
            seed=3,
            extra_body={**PROOF["extra_body"], "ignore_eos": True},
            logprobs=True,
        )
        (choice,) = answer["choices"]
        assert {name: answer[name] for name in ("object", "model", "prompt_token_ids", "usage")} == {
            "object": "chat.completion",
            "model": "agent@1",
            "prompt_token_ids": tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False),
            "usage": answer["usage"] | {"completion_tokens": 6, "prompt_tokens": len(answer["prompt_token_ids"])},
        }
        assert {name: choice[name] for name in ("index", "finish_reason")} == {"index": 0, "finish_reason": "length"}
        assert choice["message"]["role"] == "assistant"
        # An answer may end in the middle of a character; engines differ in what they make of that.
        text = tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        assert choice["message"]["content"].rstrip("\ufffd") == text.rstrip("\ufffd")
        assert len(choice["token_ids"]) == 6 == len(choice["logprobs"]["content"])
        assert all(math.isfinite(entry["logprob"]) for entry in choice["logprobs"]["content"])

    @pytest.mark.parametrize("temperature", [None, 1.0, 0.7, 1.3])
    @pytest.mark.parametrize("policy", ["agent@0", "agent@1", "agent@2"])
    def test_logprobs_are_those_that_a_trainer_computes(
        self,
        running: Running,
        plain_logprobs: Callable[..., list[float]],
        policy: str,
        temperature: float | None,
        tolerance: float,
    ) -> None:
        options = {} if temperature is None else {"temperature": temperature}
        answer = ask(running.openai, policy, n=3, max_tokens=40, **options, **PROOF)
        for choice in answer["choices"]:
            expected = plain_logprobs(policy, answer["prompt_token_ids"], choice["token_ids"], temperature or 1.0)
            assert [e["logprob"] for e in choice["logprobs"]["content"]] == pytest.approx(expected, abs=tolerance)

    def test_logprobs_are_exact_with_tools_and_in_a_stream(
        self,
        running: Running,
        plain_logprobs: Callable[..., list[float]],
        tolerance: float,
    ) -> None:
        chunks = running.openai.chat.completions.create(
            model="agent@1", messages=HELLO, tools=[LOOKUP_TOOL], max_tokens=40, stream=True, temperature=0.8, **PROOF
        )
        (choice,) = assembled(chunks)["choices"]
        expected = plain_logprobs("agent@1", choice["prompt"], choice["ids"], 0.8)
        assert choice["logprobs"] == pytest.approx(expected, abs=tolerance)

    def test_proof_is_left_out_unless_asked_for(self, running: Running) -> None:
        answer = ask(running.openai, max_tokens=2)
        assert answer.get("prompt_token_ids") is None
        assert answer["choices"][0]["logprobs"] is None
        assert answer["choices"][0].get("token_ids") is None

    def test_models_lists_every_policy(self, running: Running) -> None:
        assert running.client.models()[:3] == ["agent@0", "agent@1", "agent@2"]
        assert [model.id for model in running.openai.models.list()] == running.client.models()

    def test_ragged_neighbours_of_other_policies_change_nothing(self, running: Running) -> None:
        jobs = [
            (f"agent@{step}", "apple " * length + f"{length}", tokens)
            for step in (0, 1, 2)
            for length, tokens in ((1, 30), (40, 5), (7, 17), (100, 40), (3, 9))
        ]
        alone = [greedy(running.openai, *job) for job in jobs]
        with ThreadPoolExecutor(len(jobs)) as pool:
            together = list(pool.map(lambda job: greedy(running.openai, *job), jobs * 3))
        assert together == alone * 3
        assert alone[0][:5] != alone[5][:5] != alone[10][:5], "the policies must differ for this to mean anything"

    def test_a_seed_gives_the_same_tokens_in_any_company(self, running: Running) -> None:
        def draw(seed: int) -> list[int]:
            return ask(running.openai, "agent@1", seed=seed, max_tokens=20, **PROOF)["choices"][0]["token_ids"]

        alone = [draw(seed) for seed in range(6)]
        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(draw, [0, 1, 2, 3, 4, 5] * 2)) == alone * 2
        assert len({tuple(ids) for ids in alone}) == 6

    def test_choices_differ_and_are_numbered(self, running: Running) -> None:
        answer = ask(running.openai, n=3, seed=7, max_tokens=12, **PROOF)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
        sampled = sum(len(choice["token_ids"]) for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] == sampled
        second = ask(running.openai, seed=8, max_tokens=12, **PROOF)
        assert second["choices"][0]["token_ids"] == answer["choices"][1]["token_ids"]

    @pytest.mark.parametrize("options", [{"n": 1}, {"n": 3}, {"n": 2, "stop": ["a", "e"]}, {"top_p": 0.5}])
    def test_a_stream_put_together_is_the_whole_answer(self, running: Running, options: dict[str, Any]) -> None:
        options = {**options, "seed": 11, "max_tokens": 40, **PROOF}
        whole = ask(running.openai, "agent@2", **options)
        stream = assembled(
            running.openai.chat.completions.create(
                model="agent@2", messages=HELLO, stream=True, stream_options={"include_usage": True}, **options
            )
        )
        assert stream["usage"] == {name: whole["usage"][name] for name in stream["usage"]}
        assert stream["usage"].keys() >= {"prompt_tokens", "completion_tokens", "total_tokens"}
        for streamed, choice in zip(stream["choices"], whole["choices"], strict=True):
            assert streamed == {
                "content": choice["message"]["content"],
                "ids": choice["token_ids"],
                "logprobs": pytest.approx([e["logprob"] for e in choice["logprobs"]["content"]], abs=1e-5),
                "calls": [],
                "reason": choice["finish_reason"],
                "prompt": whole["prompt_token_ids"],
            }

    def test_a_stop_string_ends_the_answer(self, running: Running, tokenizer: Any) -> None:
        text = ask(running.openai, temperature=0, max_tokens=40)["choices"][0]["message"]["content"]
        stop = text[len(text) // 2 : len(text) // 2 + 2]
        answer = ask(running.openai, temperature=0, max_tokens=40, stop=stop, **PROOF)
        choice = answer["choices"][0]
        assert choice["message"]["content"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert stop in tokenizer.decode(choice["token_ids"]), "the sampled ids are all reported"
        assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])

    def test_unknown_things_get_openai_shaped_errors(self, running: Running) -> None:
        with pytest.raises(openai.NotFoundError, match=r"does not exist\. Served models: agent@0, agent@1, agent@2"):
            ask(running.openai, "agent@77")
        with pytest.raises(openai.NotFoundError) as missing:
            running.openai.get("/nowhere", cast_to=object)
        assert set(missing.value.body) == {"message", "type", "param", "code"}
        with pytest.raises(openai.APIStatusError) as method:
            running.openai.get("/chat/completions", cast_to=object)
        assert method.value.status_code == 405
        with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as raw:
            raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
            raw.sendall(b"Content-Type: application/json\r\nContent-Length: 3\r\n\r\n{x}")
            answer = b""
            while b"}}" not in answer:
                answer += raw.recv(4096)
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["message"].startswith("the body is not JSON")

    def test_policies_come_and_go_under_traffic_without_a_failure(self, running: Running) -> None:
        stop = threading.Event()
        expected = greedy(running.openai, "agent@1", "pear")

        def talk(worker: int) -> int:
            count = 0
            while not stop.is_set():
                if worker % 2:
                    assert greedy(running.openai, "agent@1", "pear") == expected
                else:
                    options: Any = {"max_tokens": 20, "stream": True}
                    stream = running.openai.chat.completions.create(model="agent@0", messages=HELLO, **options)
                    assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")
                count += 1
            return count

        with ThreadPoolExecutor(8) as pool:
            talkers = [pool.submit(talk, worker) for worker in range(8)]
            try:
                for _ in range(4):
                    for name in ("agent@3", "agent@4"):
                        running.client.load(name)
                        assert greedy(running.openai, name, "pear") != expected
                        running.client.unload(name)
            finally:
                stop.set()
            assert all(talker.result() > 0 for talker in talkers)

    def test_what_runs_on_an_unloaded_policy_finishes_on_it(self, running: Running) -> None:
        running.client.load("agent@3")
        undisturbed = greedy(running.openai, "agent@3", "plum", 200)
        options: Any = {"temperature": 0, "max_tokens": 200, "stream": True, **PROOF}
        messages: Any = [{"role": "user", "content": "plum"}]
        stream = running.openai.chat.completions.create(model="agent@3", messages=messages, **options)
        first = next(stream)
        running.client.unload("agent@3")
        with pytest.raises(openai.NotFoundError):
            ask(running.openai, "agent@3")
        running.client.load("agent@3")  # the same name again, while the old one still runs
        assert assembled([first, *stream])["choices"][0]["ids"] == undisturbed
        running.client.unload("agent@3")

    def test_loading_twice_and_unloading_the_base_are_refused(self, running: Running) -> None:
        with pytest.raises(AdapterRejected, match="is served already"):
            running.client.load("agent@1")
        with pytest.raises(AdapterRejected, match="is served already"):
            running.client.load("agent@0")
        with pytest.raises(AdapterRejected, match="is the base model"):
            running.client.unload("agent@0")
        with pytest.raises(EngineError, match="answered 404"):
            running.client.unload("agent@99")

    def test_a_path_may_only_confirm_the_name(self, running: Running, adapters: Path) -> None:
        admin = running.openai.with_options(api_key=ADMIN_KEY)
        for path in ("/etc/passwd", str(adapters / "agent@1"), "../agent@4", str(adapters / "agent@4" / ".."), 3, "\0"):
            with pytest.raises(openai.BadRequestError, match="lora_path"):
                body = {"lora_name": "agent@4", "lora_path": path}
                admin.post("/load_lora_adapter", body=body, cast_to=object)
        body = {"lora_name": "agent@4", "lora_path": str(adapters / "agent@4")}
        admin.post("/load_lora_adapter", body=body, cast_to=object)
        running.client.unload("agent@4")
        for name in ("../../etc", "agent@4/..", "agent", "", "agent@404"):
            with pytest.raises(AdapterRejected):
                running.client.load(name)

    def test_bad_adapters_are_refused_while_serving_goes_on(
        self, running: Running, base_dir: Path, adapters: Path
    ) -> None:
        expected = greedy(running.openai, "agent@1", "pear")
        fingerprint = base_fingerprint(base_dir)
        cases = [(spoil, reason, True) for spoil, reason in BEFORE_PUBLISHING.values()]
        cases += [(spoil, reason, False) for spoil, reason in AFTER_PUBLISHING.values()]
        first = 1000 + len(list(adapters.glob("bad@*")))  # the engines share the directory
        for step, (spoil, reason, before) in enumerate(cases, start=first):
            work = make_adapter_files(adapters / f"work{step}", base_dir)
            if before:
                spoil(work)
            final = publish_adapter(work, adapters / f"bad@{step}", base_sha256=fingerprint)
            if not before:
                spoil(final)
                for leftover in ("elsewhere", "real"):  # where some of them move a file to
                    if (adapters / leftover).exists():
                        (adapters / leftover).rename(adapters / f"{leftover}{step}")
            with pytest.raises(AdapterRejected) as refusal:
                running.client.load(f"bad@{step}")
            assert before is False or reason in str(refusal.value)
        assert not [name for name in running.client.models() if name.startswith("bad")]
        assert greedy(running.openai, "agent@1", "pear") == expected

    def test_the_policy_directory_is_the_name(self, running: Running, base_dir: Path, adapters: Path) -> None:
        final = make_tiny_adapter(adapters, base_dir, "other.bot", 5, seed=9)
        running.client.load("other.bot@5")
        assert ask(running.openai, "other.bot@5", max_tokens=1)["model"] == "other.bot@5"
        running.client.unload("other.bot@5")
        shutil.rmtree(final)
