"""The tiny base model: a real model directory, a template that gives back what was sampled, one model per seed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art_patch.demo import shop_model
from art_patch.demo.shop import COUNTS, ITEMS, TOOLS, question
from art_patch.demo.shop_model import WarmUp, build_model, shop_tokenizer
from art_patch.demo.tiny_model import END_OF_TURN
from art_patch.errors import ConfigError

SHORT = WarmUp(steps=3, batch=4)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return shop_tokenizer()


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "tiny", seed=1, warm_up=SHORT)


def prompt(tokenizer: Any, *messages: dict[str, Any]) -> list[int]:
    return tokenizer.apply_chat_template(list(messages), tools=TOOLS, add_generation_prompt=True, return_dict=False)


def call(arguments: Any, content: str | None = None) -> dict[str, Any]:
    function = {"name": "lookup", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


ASK = {"role": "user", "content": question(3, "plum")}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "4"}


def test_import_leaves_torch_alone():
    code = "import sys, art_patch.demo.tiny_model; print({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_layout_is_qwen3s(tokenizer: Any):
    messages = [ASK, call('{"item": "plum"}'), RESULT, {"role": "assistant", "content": "12"}]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    system, rest = text.split("<|im_start|>user\nprice", 1)
    assert system.startswith("<|im_start|>system\n# Tools\n\n<tools>\n" + json.dumps(TOOLS[0]) + "\n</tools>\n\n")
    assert rest == (
        " of 3 plum?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "lookup", "arguments": {"item": "plum"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n12<|im_end|>\n"
    )


def test_system_messages_and_several_calls(tokenizer: Any):
    two = call('{"item": "plum"}', "Let me look.")
    two["tool_calls"] = two["tool_calls"] * 2
    messages = [{"role": "system", "content": "Be brief."}, ASK, two, RESULT, RESULT]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    one = '<tool_call>\n{"name": "lookup", "arguments": {"item": "plum"}}\n</tool_call>'
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert f"<|im_start|>assistant\nLet me look.\n{one}\n{one}<|im_end|>\n" in text
    response = "\n<tool_response>\n4\n</tool_response>"
    assert text.endswith(f"<|im_start|>user{response}{response}<|im_end|>\n")
    without_tools = tokenizer.apply_chat_template(messages[:2], tokenize=False)
    assert without_tools == f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{ASK['content']}<|im_end|>\n"


@pytest.mark.parametrize("arguments", ['{"item": "plum"}', {"item": "plum"}], ids=["as the SDK has it", "parsed"])
@pytest.mark.parametrize("content", [None, ""])
def test_second_prompt_extends_the_first_and_what_was_sampled(tokenizer: Any, arguments: Any, content: str | None):
    sampled = '<tool_call>\n{"name": "lookup", "arguments": {"item": "plum"}}\n</tool_call>' + END_OF_TURN
    turn_1 = prompt(tokenizer, ASK) + tokenizer.encode(sampled)
    turn_2 = prompt(tokenizer, ASK, call(arguments, content), RESULT)
    assert turn_2[: len(turn_1)] == turn_1
    assert tokenizer.decode(turn_1[len(prompt(tokenizer, ASK)) :]) == sampled


def test_keys_that_a_server_adds_to_a_tool_change_nothing(tokenizer: Any):
    function = {"parameters": TOOLS[0]["function"]["parameters"], "strict": None, **TOOLS[0]["function"]}
    dumped = [{"function": function, "type": "function"}]
    ids = tokenizer.apply_chat_template([ASK], tools=dumped, add_generation_prompt=True, return_dict=False)
    assert ids == prompt(tokenizer, ASK)


def test_demonstrations_are_what_the_template_renders(tokenizer: Any):
    turns, rng = shop_model._Turns.of(tokenizer), random.Random(0)
    warm_up = WarmUp(p_call=1.0, p_item=1.0, p_multiply=1.0)
    for _ in range(20):
        ids, labels = turns.demonstration(warm_up, rng)
        text = tokenizer.decode(ids)
        asked = text.split("price of ")[1].split("?")[0]
        price = text.split("<tool_response>\n")[1][0]
        count, item = asked.split()
        answer = str(int(count) * int(price))
        messages = [
            {"role": "user", "content": f"price of {asked}?"},
            call(json.dumps({"item": item})),
            {"role": "tool", "tool_call_id": "c", "content": price},
            {"role": "assistant", "content": answer},
        ]
        assert tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False) == ids
        trained = [token for token in labels if token >= 0]
        lookup = f'<tool_call>\n{{"name": "lookup", "arguments": {{"item": "{item}"}}}}\n</tool_call>'
        assert tokenizer.decode(trained) == f"{lookup}{END_OF_TURN}{answer}{END_OF_TURN}"


def test_ordinary_conversations_are_short(tokenizer: Any):
    assert len(prompt(tokenizer, ASK, call('{"item": "plum"}'), RESULT)) == 35
    assert (
        len({len(prompt(tokenizer, {"role": "user", "content": question(c, i)})) for c in COUNTS for i in ITEMS}) == 1
    )


def test_any_text_survives(tokenizer: Any):
    assert len(tokenizer) < 500
    for text in ("Prix d'une pêche ? 漢字 🙂\t\n  x", "12345 apples", json.dumps(TOOLS), "<tool_call>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(len(tokenizer.encode(word)) == 1 for word in (*ITEMS, *"0123456789"))


def test_tags_survive_decoding_and_control_tokens_do_not(tokenizer: Any):
    ids = tokenizer.encode("<tool_call>x</tool_call><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>x</tool_call>"


def test_directory_is_an_ordinary_model(model_directory: Path, tokenizer: Any):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(model_directory)
    loaded: Any = AutoTokenizer.from_pretrained(model_directory)
    assert model.config.model_type == "qwen3" and model.num_parameters() < 600_000
    assert model.config.vocab_size == len(loaded) == len(tokenizer)
    assert model.generation_config.eos_token_id == loaded.eos_token_id == loaded.encode(END_OF_TURN)[0]
    assert prompt(loaded, ASK) == prompt(tokenizer, ASK)
    assert not [path for path in model_directory.iterdir() if path.suffix in {".bin", ".pt", ".pkl"}]
    assert (model_directory / "model.safetensors").is_file()


def test_same_seed_same_model_and_progress_is_told(model_directory: Path, tmp_path: Path):
    told: list[tuple[int, int, float]] = []
    again = build_model(tmp_path / "a", seed=1, warm_up=SHORT, progress=lambda *step: told.append(step))
    other = build_model(tmp_path / "b", seed=2, warm_up=SHORT)
    weights = [(path / "model.safetensors").read_bytes() for path in (model_directory, again, other)]
    assert weights[0] == weights[1] != weights[2]
    assert (model_directory / "tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()
    assert [(step, total) for step, total, _ in told] == [(1, 3), (2, 3), (3, 3)]
    assert all(loss > 0 for *_, loss in told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_complete_directory_is_returned_at_once_and_others_are_refused(model_directory: Path, tmp_path: Path):
    assert build_model(model_directory, seed=1, warm_up=SHORT, progress=pytest.fail) == model_directory
    with pytest.raises(ConfigError, match="another directory"):
        build_model(model_directory, seed=2, warm_up=SHORT)
    function = TOOLS[0]["function"]  # the same tool with its keys in another order is another prompt
    reordered = [{"type": "function", "function": dict(reversed(function.items()))}]
    assert reordered == TOOLS
    with pytest.raises(ConfigError, match="another directory"):
        build_model(model_directory, seed=1, warm_up=SHORT, tools=reordered)
    with pytest.raises(ConfigError, match="another directory"):
        build_model(tmp_path, seed=1, warm_up=SHORT)


def test_failed_build_leaves_nothing(tmp_path: Path):
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_model(tmp_path / "tiny", seed=1, warm_up=SHORT, progress=stop)
    assert list(tmp_path.iterdir()) == []
