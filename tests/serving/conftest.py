"""One server for the folder; `serve` makes others for tests that break theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from art_patch.serving import EmbeddedEngine
from art_patch.serving.embedded.engine import EngineLimits
from tests.support.engines import Running, serve
from tests.support.tiny import make_tokenizer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def running(base_dir: Path, adapters: Path) -> Iterator[Running]:
    """Serves the base, agent@1 and agent@2; tests may load and unload others."""
    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters)
    with serve(engine) as server:
        server.client.load("agent@1")
        server.client.load("agent@2")
        yield server


def make_scripted_model(directory: Path, script: list[str]) -> Path:
    """A checkpoint that answers anything with these pieces, one token each, and ends its turn; pieces must differ."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(512)
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([piece for piece in script if piece not in known])
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    chain = tokenizer.convert_tokens_to_ids([*script, tokenizer.eos_token])
    newline = tokenizer.encode("\n", add_special_tokens=False)
    with torch.no_grad():
        # Without attention and MLP a token's successor depends on that token alone: the head is a transition table.
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.nn.functional.normalize(torch.randn(len(tokenizer), 64), dim=1)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.zero_()
        for before, after in zip([newline[-1], *chain[:-1]], chain, strict=True):
            model.lm_head.weight[after] += 10 * embedding[before]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


CALL = ["<tool_call>", '\n{"name": "look', 'up", "arguments": ', '{"item": "plum"}}\n', "</tool_call>"]


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Always says some text and calls lookup(item="plum"), then asks for the weather, then ends its turn."""
    directory = tmp_path_factory.mktemp("scripted")
    base = make_scripted_model(directory / "base", ["Let me", " see…", " \n", *CALL, " and that is it"])
    engine = EmbeddedEngine.from_pretrained(base, adapters_root=directory, limits=EngineLimits(max_rows=8))
    with serve(engine) as server:
        yield server
