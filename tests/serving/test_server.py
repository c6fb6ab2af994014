"""The engine through the real OpenAI client over real HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI

from art_patch.errors import AdapterRejected, ConfigError, EngineError, ModelNotFound, PortInUse
from art_patch.listening import listen
from art_patch.serving.base_model import base_fingerprint
from art_patch.serving.client import EngineClient
from art_patch.serving.embedded import cohort as cohort_module
from art_patch.serving.embedded.engine import EmbeddedEngine, EngineLimits
from tests.serving.conftest import Running, serve
from tests.serving.test_adapters import AFTER_PUBLISHING, BEFORE_PUBLISHING
from tests.tiny import make_adapter_files, make_tiny_adapter

HELLO = [{"role": "user", "content": "what is the price of 3 plums?"}]
PROOF = {"logprobs": True, "extra_body": {"return_token_ids": True}}


def ask(client: OpenAI, policy: str = "agent@0", messages: Any = HELLO, **options: Any) -> dict[str, Any]:
    return client.chat.completions.create(model=policy, messages=messages, **options).to_dict()


def greedy(client: OpenAI, policy: str, content: str, tokens: int = 24) -> list[int]:
    messages = [{"role": "user", "content": content}]
    answer = ask(client, policy, messages, temperature=0, max_tokens=tokens, **PROOF)
    return answer["choices"][0]["token_ids"]


def assembled(stream: Any) -> dict[str, Any]:
    """Puts a stream together; checks what must hold of every chunk."""
    out: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in stream:
        chunk = chunk.to_dict()
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["system_fingerprint"] == chunk["model"]
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            state = out.setdefault(
                choice["index"],
                {"content": "", "ids": [], "logprobs": [], "calls": [], "reason": None, "prompt": None},
            )
            assert state["reason"] is None, "nothing may follow the finish reason"
            state["prompt"] = state["prompt"] or chunk.get("prompt_token_ids")
            state["content"] += choice["delta"].get("content") or ""
            state["ids"] += choice.get("token_ids") or []
            state["logprobs"] += [e["logprob"] for e in (choice.get("logprobs") or {"content": []})["content"]]
            state["calls"] += choice["delta"].get("tool_calls") or []
            state["reason"] = choice["finish_reason"]
    return {"choices": [out[index] for index in sorted(out)], "usage": usage}


def reference_logprobs(
    engine: EmbeddedEngine, prompt: list[int], sampled: list[int], temperature: float
) -> list[float]:
    """The plain way: one forward of the model as it stands, no cache, no batch."""
    with torch.inference_mode():
        logits = engine._model(input_ids=torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, torch.tensor(sampled).unsqueeze(1)).squeeze(1).tolist()


def test_the_whole_answer(running: Running) -> None:
    answer = ask(running.openai, "agent@1", max_tokens=6, seed=3, **PROOF)
    choice = answer["choices"][0]
    ids = choice["token_ids"]
    prompts = running.engine.prompts
    assert answer == {
        "id": answer["id"],
        "object": "chat.completion",
        "created": answer["created"],
        "model": "agent@1",
        "system_fingerprint": "agent@1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": prompts.decode(ids)},
                "logprobs": {
                    "content": [
                        {
                            "token": prompts.token_entry(token_id)[0],
                            "logprob": entry["logprob"],
                            "bytes": prompts.token_entry(token_id)[1],
                            "top_logprobs": [],
                        }
                        for token_id, entry in zip(ids, choice["logprobs"]["content"], strict=True)
                    ],
                    "refusal": None,
                },
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": ids,
            }
        ],
        "usage": {
            "prompt_tokens": len(answer["prompt_token_ids"]),
            "completion_tokens": 6,
            "total_tokens": len(answer["prompt_token_ids"]) + 6,
        },
        "prompt_token_ids": prompts.encode(HELLO),
    }
    assert answer["id"].startswith("chatcmpl-")
    assert len(ids) == 6


def test_proof_is_left_out_unless_asked_for(running: Running) -> None:
    answer = ask(running.openai, max_tokens=2)
    assert "prompt_token_ids" not in answer
    assert answer["choices"][0]["logprobs"] is None
    assert "token_ids" not in answer["choices"][0]


def test_models_lists_every_policy(running: Running) -> None:
    assert running.client.models()[:3] == ["agent@0", "agent@1", "agent@2"]
    assert [model.id for model in running.openai.models.list()] == running.client.models()


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_a_plain_forward(merge: bool, temperature: float, base_dir: Path, adapters: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters, merge=merge)
    with serve(engine) as server:
        server.client.load("agent@1")
        server.client.load("agent@2")
        answers = {
            policy: ask(server.openai, policy, n=3, temperature=temperature, top_p=0.8, max_tokens=20, seed=5, **PROOF)
            for policy in ("agent@2", "agent@0", "agent@1")
        }
    for policy, answer in answers.items():
        model = AutoModelForCausalLM.from_pretrained(base_dir)
        if policy != "agent@0":
            model = PeftModel.from_pretrained(model, adapters / policy).eval()
        holder: Any = type("Holder", (), {"_model": model})
        for choice in answer["choices"]:
            expected = reference_logprobs(holder, answer["prompt_token_ids"], choice["token_ids"], temperature)
            got = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert got == pytest.approx(expected, abs=1e-4)


def test_ragged_neighbours_of_other_policies_change_nothing(running: Running) -> None:
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


def test_a_seed_gives_the_same_tokens_in_any_company(running: Running) -> None:
    def draw(seed: int) -> list[int]:
        return ask(running.openai, "agent@1", seed=seed, max_tokens=20, **PROOF)["choices"][0]["token_ids"]

    alone = [draw(seed) for seed in range(6)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(draw, [0, 1, 2, 3, 4, 5] * 2)) == alone * 2
    assert len({tuple(ids) for ids in alone}) == 6


def test_choices_differ_and_are_numbered(running: Running) -> None:
    answer = ask(running.openai, n=3, seed=7, max_tokens=12, **PROOF)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    sampled = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == sampled
    second = ask(running.openai, seed=8, max_tokens=12, **PROOF)
    assert second["choices"][0]["token_ids"] == answer["choices"][1]["token_ids"]


@pytest.mark.parametrize("options", [{"n": 1}, {"n": 3}, {"n": 2, "stop": ["a", "e"]}, {"top_p": 0.5}])
def test_a_stream_put_together_is_the_whole_answer(running: Running, options: dict[str, Any]) -> None:
    options = {**options, "seed": 11, "max_tokens": 40, **PROOF}
    whole = ask(running.openai, "agent@2", **options)
    stream = assembled(
        running.openai.chat.completions.create(
            model="agent@2", messages=HELLO, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    assert stream["usage"] == whole["usage"]
    for streamed, choice in zip(stream["choices"], whole["choices"], strict=True):
        assert streamed == {
            "content": choice["message"]["content"],
            "ids": choice["token_ids"],
            "logprobs": pytest.approx([e["logprob"] for e in choice["logprobs"]["content"]], abs=1e-5),
            "calls": [],
            "reason": choice["finish_reason"],
            "prompt": whole["prompt_token_ids"],
        }


def test_a_stop_string_ends_the_answer(running: Running) -> None:
    text = ask(running.openai, temperature=0, max_tokens=40)["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    answer = ask(running.openai, temperature=0, max_tokens=40, stop=stop, **PROOF)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert stop in running.engine.prompts.decode(choice["token_ids"]), "the sampled ids are all reported"
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])


def test_the_stop_token_is_among_the_ids(scripted: Running) -> None:
    answer = ask(scripted.openai, temperature=0, **PROOF)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith("Let me see… \n<tool_call>"), "no tools given: a call is text"
    assert choice["token_ids"][-1] in scripted.engine._scheduler._stop_ids
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_goes_round(scripted: Running, lookup_tool: dict[str, Any], stream: bool) -> None:
    options = {"temperature": 0, "tools": [lookup_tool], **PROOF}
    if stream:
        chunks = scripted.openai.chat.completions.create(model="agent@0", messages=HELLO, stream=True, **options)
        (choice,) = assembled(chunks)["choices"]
        content, calls, reason, ids = choice["content"], choice["calls"], choice["reason"], choice["ids"]
        assert calls[0].pop("index") == 0
    else:
        (choice,) = ask(scripted.openai, **options)["choices"]
        content, calls = choice["message"]["content"], choice["message"]["tool_calls"]
        reason, ids = choice["finish_reason"], choice["token_ids"]
    assert (content, reason) == ("Let me see…and that is it", "tool_calls")
    assert len(ids) == 10, "also the ids of text that was held back"
    assert calls == [
        {"id": calls[0]["id"], "type": "function", "function": {"name": "lookup", "arguments": '{"item": "plum"}'}}
    ]
    assert calls[0]["id"].startswith("call_")
    conversation = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "4"},
    ]
    prompt = ask(scripted.openai, messages=conversation, **options)["prompt_token_ids"]
    shown = scripted.engine.prompts.decode(prompt)
    assert '<tool_call>\n{"name": "lookup", "arguments": {"item": "plum"}}\n</tool_call>' in shown
    assert "<tool_response>\n4\n</tool_response>" in shown


def test_tool_choice_none_and_one_call_at_a_time(scripted: Running, lookup_tool: dict[str, Any]) -> None:
    silent = ask(scripted.openai, temperature=0, tools=[lookup_tool], tool_choice="none")["choices"][0]
    assert "tool_calls" not in silent["message"]
    single = ask(scripted.openai, temperature=0, tools=[lookup_tool], parallel_tool_calls=False, **PROOF)["choices"][0]
    assert (single["finish_reason"], single["message"]["content"]) == ("tool_calls", "Let me see…")
    assert len(single["token_ids"]) == 8, "it ends with the call"


def test_an_answer_cut_inside_a_call_stays_text(scripted: Running, lookup_tool: dict[str, Any]) -> None:
    choice = ask(scripted.openai, temperature=0, tools=[lookup_tool], max_tokens=6)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('Let me see… \n<tool_call>\n{"name": "look')


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "lookup"}}}, "tool_choice"),
    ({"logit_bias": {"5": 3}}, "logit_bias"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ({"top_k": 20}, "top_k"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"store": True}, "store"),
    ({"never_heard_of": 1}, "never_heard_of"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": "all"}, "tools"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0]"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": []}, "messages"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "messages"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "plum " * 3000}]}, "messages"),
]


@pytest.mark.parametrize(("change", "param"), REFUSALS, ids=str)
def test_what_cannot_be_honoured_is_refused(running: Running, change: dict[str, Any], param: str) -> None:
    body = {"model": "agent@0", "messages": HELLO, "max_tokens": 2, **change}
    with pytest.raises(openai.BadRequestError) as refusal:
        running.openai.post("/chat/completions", body=body, cast_to=object)
    error: Any = refusal.value.body
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_neutral_values_and_names_of_the_caller_are_accepted(running: Running) -> None:
    neutral = {
        "response_format": {"type": "text"}, "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0,
        "top_logprobs": 0, "store": False, "user": "u", "metadata": {"a": "b"}, "tools": None, "tool_choice": "auto",
        "seed": None, "service_tier": "auto", "max_completion_tokens": 3, "max_tokens": 99,
    }  # fmt: skip
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "it?"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    body = {"model": "agent@0", "messages": messages, **neutral}
    answer: Any = running.openai.post("/chat/completions", body=body, cast_to=object)
    assert answer["usage"]["completion_tokens"] == 3


def test_unknown_things_get_openai_shaped_errors(running: Running) -> None:
    with pytest.raises(openai.NotFoundError, match=r"does not exist\. Served models: agent@0, agent@1, agent@2"):
        ask(running.openai, "agent@77")
    with pytest.raises(openai.NotFoundError) as missing:
        running.openai.get("/nowhere", cast_to=object)
    assert set(missing.value.body) == {"message", "type", "param", "code"}
    with pytest.raises(openai.APIStatusError) as method:
        running.openai.get("/chat/completions", cast_to=object)
    assert method.value.status_code == 405
    with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n{x}")
        answer = b""
        while b"}" not in answer:
            answer += raw.recv(4096)
    assert b'"message":"the body is not JSON' in answer


def test_policies_come_and_go_under_traffic_without_a_failure(running: Running) -> None:
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


def test_what_runs_on_an_unloaded_policy_finishes_on_it(running: Running) -> None:
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
    wait_until(lambda: running.engine.stats()["retired"] == 0)


def test_loading_twice_and_unloading_the_base_are_refused(running: Running) -> None:
    with pytest.raises(AdapterRejected, match="is served already"):
        running.client.load("agent@1")
    with pytest.raises(AdapterRejected, match="is served already"):
        running.client.load("agent@0")
    with pytest.raises(AdapterRejected, match="is the base model"):
        running.client.unload("agent@0")
    with pytest.raises(EngineError, match="answered 404"):
        running.client.unload("agent@99")


def test_a_path_may_only_confirm_the_name(running: Running, adapters: Path) -> None:
    for path in ("/etc/passwd", str(adapters / "agent@1"), "../agent@4", str(adapters / "agent@4" / ".."), 3, "\0"):
        with pytest.raises(openai.BadRequestError, match="lora_path"):
            body = {"lora_name": "agent@4", "lora_path": path}
            running.openai.post("/load_lora_adapter", body=body, cast_to=object)
    body = {"lora_name": "agent@4", "lora_path": str(adapters / "agent@4")}
    running.openai.post("/load_lora_adapter", body=body, cast_to=object)
    running.client.unload("agent@4")
    for name in ("../../etc", "agent@4/..", "agent", "", "agent@404"):
        with pytest.raises(AdapterRejected):
            running.client.load(name)


def test_bad_adapters_are_refused_while_serving_goes_on(running: Running, base_dir: Path, adapters: Path) -> None:
    from art_patch.serving.adapters import publish_adapter

    expected = greedy(running.openai, "agent@1", "pear")
    fingerprint = base_fingerprint(base_dir)
    cases = [(spoil, reason, True) for spoil, reason in BEFORE_PUBLISHING.values()]
    cases += [(spoil, reason, False) for spoil, reason in AFTER_PUBLISHING.values()]
    for step, (spoil, reason, before) in enumerate(cases, start=1000):
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


def test_a_failed_step_fails_its_batch_and_nothing_else(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = greedy(running.openai, "agent@1", "pear", 60)
    advance = cohort_module.Cohort.advance

    def broken(self: Any, model: Any, token_ids: Any) -> None:
        if self.policy.name == "agent@2" and len(self.rows[0].token_ids) == 3:
            raise RuntimeError("out of memory")
        advance(self, model, token_ids)

    monkeypatch.setattr(cohort_module.Cohort, "advance", broken)
    with ThreadPoolExecutor(2) as pool:
        healthy = pool.submit(greedy, running.openai, "agent@1", "pear", 60)
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            ask(running.openai, "agent@2", max_tokens=10, extra_body={"ignore_eos": True})
        with pytest.raises(openai.APIError, match="out of memory"):
            list(
                running.openai.chat.completions.create(
                    model="agent@2", messages=HELLO, max_tokens=10, stream=True, extra_body={"ignore_eos": True}
                )
            )
        assert healthy.result() == expected
    monkeypatch.undo()
    assert len(greedy(running.openai, "agent@2", "pear", 4)) == 4
    assert running.client.health()


def test_a_row_that_computes_nan_fails_alone(base_dir: Path, tmp_path: Path) -> None:
    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=tmp_path)
    with serve(engine) as server:
        # Token 300 becomes poison: prompts that hold it compute NaN, others do not.
        with torch.no_grad():
            engine._model.model.embed_tokens.weight.data[300] = math.nan
            engine._model.lm_head.weight = torch.nn.Parameter(engine._model.lm_head.weight.detach().nan_to_num(0.0))
        text = engine.prompts.token_entry(300)[0]
        with ThreadPoolExecutor(2) as pool:
            good = pool.submit(ask, server.openai, max_tokens=10)
            with pytest.raises(openai.InternalServerError, match="computed NaN"):
                ask(server.openai, messages=[{"role": "user", "content": f"{text}{text}"}], n=2, max_tokens=5)
            assert all(e is not None for e in good.result()["choices"])


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_rows(running: Running, stream: bool) -> None:
    body = json.dumps(
        {"model": "agent@1", "messages": HELLO, "max_tokens": 900, "n": 4, "ignore_eos": True, "stream": stream}
    ).encode()
    port = int(running.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: running.engine.stats()["running"] == 4)
    wait_until(lambda: running.engine.stats()["running"] == 0)


def test_tokens_are_streamed_as_they_are_sampled(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    advance = cohort_module.Cohort.advance

    def held(self: Any, model: Any, token_ids: Any) -> None:
        if len(self.rows[0].token_ids) == 3:
            assert gate.wait(20)
        advance(self, model, token_ids)

    monkeypatch.setattr(cohort_module.Cohort, "advance", held)
    stream = running.openai.chat.completions.create(
        model="agent@0",
        messages=HELLO,
        max_tokens=6,
        stream=True,
        extra_body={"ignore_eos": True, **PROOF["extra_body"]},
    )
    ids: list[int] = []
    for chunk in stream:
        ids += chunk.choices[0].to_dict().get("token_ids") or []
        if len(ids) == 3:
            gate.set()  # the fourth cannot have been computed yet
    assert len(ids) == 6


def test_the_key_is_asked_for_everywhere_but_health(base_dir: Path, adapters: Path) -> None:
    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters)
    with serve(engine, api_key="s3cret-key") as server:
        assert server.client.models() == ["agent@0"]
        for key in (None, "wrong", "s3cret"):
            with EngineClient(server.url, key) as stranger:
                assert stranger.health()
                for call in (
                    stranger.models,
                    lambda client=stranger: client.chat(model="agent@0", messages=HELLO),
                    lambda client=stranger: client.load("agent@1"),
                    lambda client=stranger: client.unload("agent@1"),
                ):
                    with pytest.raises(EngineError, match="answered 401: The API key is missing or wrong"):
                        call()


def test_the_address_is_checked(running: Running) -> None:
    with pytest.raises(ConfigError, match="name a key file"):
        listen("0.0.0.0", 0, key=None, what="the model")
    with pytest.raises(ConfigError, match="is not an address"):
        listen("no such host", 0, key=None, what="the model")
    with pytest.raises(PortInUse, match="another process listens"):
        listen("127.0.0.1", int(running.url.rsplit(":", 1)[1]), key=None, what="the model")
    listen("0.0.0.0", 0, key="k", what="the model").close()


def test_requests_wait_for_room_and_are_refused_beyond_the_queue(base_dir: Path, adapters: Path) -> None:
    limits = EngineLimits(max_rows=3, max_total_tokens=200, max_prefill_tokens=60, max_waiting=4, max_model_len=256)
    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters, limits=limits)
    with serve(engine) as server:
        with pytest.raises(openai.BadRequestError, match="n is limited to 3"):
            ask(server.openai, n=4)
        alone = greedy(server.openai, "agent@0", "plum", 30)
        with ThreadPoolExecutor(24) as pool:
            results = list(pool.map(lambda _: outcome(server.openai), range(24)))
        assert set(map(str, results)) <= {str(alone), "503"}
        assert results.count(alone) >= 5


def outcome(client: OpenAI) -> Any:
    try:
        return greedy(client, "agent@0", "plum", 30)
    except openai.InternalServerError as error:
        return error.status_code


def test_a_closing_server_finishes_what_runs(base_dir: Path, adapters: Path) -> None:
    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters)
    with ThreadPoolExecutor(1) as pool:
        with serve(engine) as server:
            client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
            expected = greedy(client, "agent@0", "plum", 300)
            late = pool.submit(greedy, client, "agent@0", "plum", 300)
            wait_until(lambda: engine.stats()["running"] == 1)
        assert late.result() == expected
        client.close()
    assert not engine.healthy
    asyncio.run(refused_after_closing(engine))


async def refused_after_closing(engine: EmbeddedEngine) -> None:
    with pytest.raises(EngineError, match="shutting down"):
        await engine.load("agent@1")


def test_the_client_says_what_is_wrong(running: Running) -> None:
    with listen("127.0.0.1", 0, key=None, what="the model") as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with EngineClient(url) as nobody:
        assert not nobody.health()
        with pytest.raises(EngineError, match="cannot reach the engine at"):
            nobody.models()
        with pytest.raises(EngineError, match="no engine answered at"):
            nobody.wait_ready(0.0)
    running.client.wait_ready(5)
    answer = running.client.chat(model="agent@0", messages=HELLO, max_tokens=2, return_token_ids=True)
    assert len(answer["choices"][0]["token_ids"]) == 2
    with pytest.raises(ValueError, match="does not stream"):
        running.client.chat(model="agent@0", messages=HELLO, stream=True)


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no directory"):
        EmbeddedEngine.from_pretrained(tmp_path / "nothing", adapters_root=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json is missing"):
        EmbeddedEngine.from_pretrained(tmp_path / "empty", adapters_root=tmp_path)


def test_the_policy_directory_is_the_name(running: Running, base_dir: Path, adapters: Path) -> None:
    final = make_tiny_adapter(adapters, base_dir, "other.bot", 5, seed=9)
    running.client.load("other.bot@5")
    assert ask(running.openai, "other.bot@5", max_tokens=1)["model"] == "other.bot@5"
    running.client.unload("other.bot@5")
    shutil.rmtree(final)
