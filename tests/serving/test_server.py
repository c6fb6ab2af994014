"""The engine through the real OpenAI client over real HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import OpenAI

from art_patch._lib.asgi import MAX_BODY_BYTES
from art_patch._lib.http_server import listen
from art_patch.errors import ConfigError, EngineError, ModelNotFound, PortInUse
from art_patch.serving import EmbeddedEngine, EngineClient
from art_patch.serving.embedded import cohort as cohort_module
from art_patch.serving.embedded.engine import EngineLimits
from art_patch.serving.embedded.generation import Generation, SamplingParams
from art_patch.types import WAIT_HEADER
from tests.support.asking import HELLO, LOOKUP_TOOL, PROOF, ask, assembled, greedy, wait_until
from tests.support.engines import Running, serve


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


def test_the_stop_token_is_among_the_ids(scripted: Running) -> None:
    answer = ask(scripted.openai, temperature=0, **PROOF)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith("Let me see… \n<tool_call>"), "no tools given: a call is text"
    assert choice["token_ids"][-1] in scripted.engine._scheduler._stop_ids
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_goes_round(scripted: Running, stream: bool) -> None:
    options = {"temperature": 0, "tools": [LOOKUP_TOOL], **PROOF}
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


def test_tool_choice_none_and_one_call_at_a_time(scripted: Running) -> None:
    silent = ask(scripted.openai, temperature=0, tools=[LOOKUP_TOOL], tool_choice="none")["choices"][0]
    assert "tool_calls" not in silent["message"]
    single = ask(scripted.openai, temperature=0, tools=[LOOKUP_TOOL], parallel_tool_calls=False, **PROOF)["choices"][0]
    assert (single["finish_reason"], single["message"]["content"]) == ("tool_calls", "Let me see…")
    assert len(single["token_ids"]) == 8, "it ends with the call"


def test_an_answer_cut_inside_a_call_stays_text(scripted: Running) -> None:
    choice = ask(scripted.openai, temperature=0, tools=[LOOKUP_TOOL], max_tokens=6)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('Let me see… \n<tool_call>\n{"name": "look')


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "grammar"}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
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


def test_the_log_says_why_calls_are_refused(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    running.engine.chat._logged_at = float("-inf")
    for value in ("\x1b[31mone", "two"):
        with pytest.raises(openai.BadRequestError):
            ask(running.openai, extra_body={value: 1})
    (line,) = [record.message for record in caplog.records if "refused" in record.message]
    assert line.startswith(r"a chat completion was refused with HTTP 400: \x1b[31mone = 1 is not supported")


def test_neutral_values_and_names_of_the_caller_are_accepted(running: Running) -> None:
    neutral = {
        "response_format": {"type": "text"}, "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0,
        "top_logprobs": 0, "store": False, "user": "u", "metadata": {"a": "b"}, "tools": None, "tool_choice": "auto",
        "seed": None, "service_tier": "auto", "max_completion_tokens": 3, "max_tokens": 99,
        "ignore_eos": True,
    }  # fmt: skip
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "it?"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    body = {"model": "agent@0", "messages": messages, **neutral}
    answer: Any = running.openai.post("/chat/completions", body=body, cast_to=object)
    assert answer["usage"]["completion_tokens"] == 3


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_rows(running: Running, stream: bool) -> None:
    body = json.dumps(
        {"model": "agent@1", "messages": HELLO, "max_tokens": 900, "n": 4, "ignore_eos": True, "stream": stream}
    ).encode()
    port = int(running.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
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
        assert set(map(str, results)) <= {str(alone), "429"}
        assert results.count(alone) >= 5


def test_what_is_not_urgent_waits_for_what_is(base_dir: Path, adapters: Path) -> None:
    limits = EngineLimits(max_rows=1, max_model_len=1024)
    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters, limits=limits)
    done: list[str] = []

    def answered(name: str, client: OpenAI, tokens: int, **body: Any) -> None:
        ask(client, max_tokens=tokens, extra_body={"ignore_eos": True, **body})
        done.append(name)

    with serve(engine) as server, ThreadPoolExecutor(4) as pool:
        # So many tokens that all three wait before it ends and that a client that wakes late keeps its place, on a busy
        # machine, too.
        pool.submit(answered, "running", server.openai, 900)
        wait_until(lambda: engine.stats()["running"] == 1)
        for waiting, (name, priority) in enumerate((("idle", 100), ("late", 0), ("urgent", -1)), 1):
            pool.submit(answered, name, server.openai, 100, priority=priority)
            wait_until(lambda waiting=waiting: engine.stats()["waiting"] == waiting)
        pool.shutdown()
    assert done == ["running", "urgent", "late", "idle"]


def outcome(client: OpenAI) -> Any:
    try:
        return greedy(client, "agent@0", "plum", 30)
    except openai.RateLimitError as error:
        assert error.code == "engine_full"
        assert 0 < int(error.response.headers["retry-after-ms"]) <= 1000 * int(error.response.headers["retry-after"])
        return error.status_code


def test_a_request_is_refused_at_once_if_its_turn_would_come_too_late(base_dir: Path, adapters: Path) -> None:
    limits = EngineLimits(max_rows=2, max_model_len=1024)
    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters, limits=limits)

    def within(seconds: str, **options: Any) -> dict[str, Any]:
        return ask(server.openai, max_tokens=4, extra_headers={WAIT_HEADER: seconds}, **options)

    with serve(engine) as server, ThreadPoolExecutor(4) as pool:
        assert within("0")["choices"]  # there is room, so it need not wait
        running = [pool.submit(ask, server.openai, max_tokens=900, extra_body={"ignore_eos": True}) for _ in "ab"]
        wait_until(lambda: engine.stats()["running"] == 2)
        for stream, seconds in ((False, "0"), (True, "0"), (False, "nan")):  # a stream is refused before its first byte
            with pytest.raises(openai.RateLimitError, match="the engine is full") as refused:
                within(seconds, stream=stream)
            assert (refused.value.code, refused.value.response.headers["retry-after"]) == ("engine_full", "1")
        with pytest.raises(openai.BadRequestError, match="not a number of seconds"):
            within("soon")
        patient = pool.submit(within, "1e9")
        without_a_limit = pool.submit(ask, server.openai, max_tokens=4)
        assert all(answer.result()["choices"] for answer in (patient, without_a_limit, *running))


def test_how_long_a_request_will_wait(base_dir: Path, adapters: Path) -> None:
    """By the rows before it that are as urgent, and by what a row takes; what the job asks for comes later."""
    limits = EngineLimits(max_rows=4, max_model_len=1024)
    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters, limits=limits)
    scheduler = engine._scheduler

    async def expected_s(**params: Any) -> float:
        with scheduler.lock:
            return scheduler._wait_s(Generation([1], SamplingParams(**params), stream=False))

    with serve(engine) as server, ThreadPoolExecutor(4) as pool:
        assert asyncio.run(expected_s(n=4)) == 0
        running = pool.submit(ask, server.openai, n=4, max_tokens=900, extra_body={"ignore_eos": True})
        wait_until(lambda: engine.stats()["running"] == 4)
        assert asyncio.run(expected_s()) == math.inf  # no row has ended yet, so it is not known
        waiting = [
            pool.submit(ask, server.openai, n=2, max_tokens=4, extra_body={"priority": priority})
            for priority in (0, 100)
        ]
        wait_until(lambda: engine.stats()["waiting"] == 2)
        with scheduler.lock:
            scheduler._row_s = 8.0
        assert [asyncio.run(expected_s(priority=priority)) for priority in (-1, 0, 100)] == [2.0, 6.0, 10.0]
        assert all(answer.result()["choices"] for answer in (running, *waiting))


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


@pytest.mark.parametrize("prefix", ["", "/exact"])
def test_a_request_that_never_ends_is_not_kept(running: Running, prefix: str) -> None:
    content, kind = b" " * (MAX_BODY_BYTES + 1), {"content-type": "application/json"}
    answer = httpx.post(f"{running.url}{prefix}/v1/chat/completions", content=content, headers=kind, timeout=60)
    assert (answer.status_code, "larger than" in answer.json()["error"]["message"]) == (413, True)


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
    answer = running.client.chat(model="agent@0", messages=HELLO, max_tokens=2, return_token_ids=True, ignore_eos=True)
    assert len(answer["choices"][0]["token_ids"]) == 2
    with pytest.raises(ValueError, match="does not stream"):
        running.client.chat(model="agent@0", messages=HELLO, stream=True)


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no directory"):
        EmbeddedEngine.from_pretrained(tmp_path / "nothing", adapters_root=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json is missing"):
        EmbeddedEngine.from_pretrained(tmp_path / "empty", adapters_root=tmp_path)
