"""Small base models that half know a task, for whoever has no GPU: a Qwen3 of half a million parameters.

`make_model` trains one on demonstrations and writes an ordinary model directory (config, safetensors, tokenizer, chat
template): whatever serves or trains a real Qwen3 takes it unchanged. `tiny_base` does so from conversations alone, and
keeps what it made in the user's cache.

- Same seed, same demonstrations, same shape: same weights. One thread is used, whatever torch is set to, because sums
  depend on it.
- A directory is complete or absent: it is written beside its place, then renamed. A complete one is returned at once;
  one that holds something else is an error, never overwritten.

Torch and transformers are imported by the functions that need them.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_patch.demo.tiny_tokenizer import CONTROL_TOKENS, END_OF_TURN, conversation_tokenizer
from art_patch.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

Progress = Callable[[int, int, float], None]
"""Called as `progress(step, total, loss)` after each warm-up step; `step` counts from 1, `loss` is nats per token."""

Row = tuple[list[int], list[int]]
"""A demonstration's ids, and the same with everything that the model does not say set to `IGNORE`."""

Conversation = Sequence[dict[str, Any]]
"""OpenAI messages; the assistant's are what is learned."""

IGNORE = -100
_MARKER = "warm_up.json"
_REMEMBERED = 50_000
"""Demonstrations whose tokens are kept, as rendering one takes half as long as learning it."""
_LOOKED_AT = 200
"""Demonstrations that a tokenizer is made from, and by which a cached model is told from another."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the model is, and how long it is taught.

    Attributes:
        steps: optimizer steps.
        batch: demonstrations a step, each drawn anew.
        peak_lr: learning rate after a ramp of a twentieth of the steps; from there it falls to a tenth, linearly.
        layers: transformer blocks.
        hidden: size of the residual stream; a head has 32 of it, an MLP three times as much.
        max_positions: tokens of prompt and answer together.
    """

    steps: int = 600
    batch: int = 48
    peak_lr: float = 2e-3
    layers: int = 2
    hidden: int = 128
    max_positions: int = 1024


def tiny_base(
    name: str,
    demonstration: Callable[[random.Random], Conversation],
    *,
    seed: int,
    words: Sequence[str] = (),
    tools: Sequence[dict[str, Any]] = (),
    shape: Shape | None = None,
) -> Path:
    """Makes a base model that has seen a task done, unless the cache has it; says on stderr how far it is.

    Args:
        name: of the task; names its directory.
        demonstration: a conversation, drawn anew with each call; as well or as badly done as the model shall do it.
        seed: of the weights and of the demonstrations.
        words: strings that shall be one token each, wherever they stand.
        tools: as the agent offers them; the template writes them into the prompt.
        shape: how large and how long; the default fits a task of a few turns.

    Returns:
        The model's directory.
    """
    from platformdirs import user_cache_path

    shape = shape or Shape()
    rng = random.Random("looked at")
    samples = [list(demonstration(rng)) for _ in range(_LOOKED_AT)]
    told = json.dumps([samples, list(words), list(tools), asdict(shape)], sort_keys=True)
    digest = hashlib.sha256(told.encode()).hexdigest()
    directory = user_cache_path("art-patch") / "tiny" / f"{name}-{seed}-{digest[:12]}"

    def tokenizer() -> PreTrainedTokenizerFast:
        return conversation_tokenizer(samples, words=words, tools=tools)

    def drawn(tokenizer: PreTrainedTokenizerFast) -> Callable[[random.Random], Row]:
        @lru_cache(_REMEMBERED)
        def row(told: str) -> Row:
            return row_of(tokenizer, json.loads(told), tools)

        return lambda rng: row(json.dumps(demonstration(rng)))

    def progress(step: int, total: int, loss: float) -> None:
        if step % 100 == 0 or step == total:
            print(f"tiny base model: step {step} of {total}, loss {loss:.3f}", file=sys.stderr)

    return make_model(
        directory,
        recipe={"name": name, "seed": seed, "demonstrations": digest},
        tokenizer=tokenizer,
        rows=drawn,
        seed=seed,
        shape=shape,
        progress=progress,
    )


def make_model(
    directory: Path,
    *,
    recipe: dict[str, Any],
    tokenizer: Callable[[], PreTrainedTokenizerFast],
    rows: Callable[[PreTrainedTokenizerFast], Callable[[random.Random], Row]],
    seed: int,
    shape: Shape,
    progress: Progress | None = None,
) -> Path:
    """Makes a model in `directory`, unless it is there already.

    Args:
        directory: where it goes; its parent is created.
        recipe: what tells this model from another, as JSON values.
        tokenizer: makes it.
        rows: draws a demonstration's tokens.
        seed: of the weights and of the demonstrations.
        shape: how large, and how long.
        progress: told about each step.

    Returns:
        `directory`.

    Raises:
        ConfigError: `directory` holds something other than this model.
    """
    if directory.exists():
        if not _is_complete(directory, recipe):
            raise ConfigError(f"{directory} is not the tiny model of {recipe}: remove it, or name another directory")
        return directory
    from transformers.utils.logging import disable_progress_bar

    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        made = tokenizer()
        model = _train(made, rows(made), seed, shape, progress)
        disable_progress_bar()
        model.save_pretrained(unfinished)
        made.save_pretrained(unfinished)
        (unfinished / _MARKER).write_text(json.dumps(recipe))
        unfinished.chmod(0o755)  # mkdtemp's 0700 would hide the model from a server that runs as another user
        try:
            unfinished.rename(directory)
        except OSError:
            # A process that made the same model may have been faster; a full directory is not replaced, nor need it be.
            if not _is_complete(directory, recipe):
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def row_of(tokenizer: PreTrainedTokenizerFast, conversation: Conversation, tools: Sequence[dict[str, Any]]) -> Row:
    """The tokens of a conversation as the template renders it; the assistant's, and its end of turn, are learned."""
    render: Any = tokenizer.apply_chat_template
    ids: list[int] = render(list(conversation), tools=list(tools) or None, return_dict=False)
    opening: list[int] = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    end: Any = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    labels = [IGNORE] * len(ids)
    place = 0
    while place < len(ids):
        if ids[place : place + len(opening)] != opening:
            place += 1
            continue
        begin = place + len(opening)
        place = ids.index(end, begin) + 1
        labels[begin:place] = ids[begin:place]
    return ids, labels


def _is_complete(directory: Path, recipe: dict[str, Any]) -> bool:
    marker = directory / _MARKER
    return marker.is_file() and json.loads(marker.read_text()) == recipe


def _train(
    tokenizer: PreTrainedTokenizerFast,
    row: Callable[[random.Random], Row],
    seed: int,
    shape: Shape,
    progress: Progress | None,
) -> Qwen3ForCausalLM:
    """Supervised fine-tuning of all parameters, on the model's own tokens only."""
    import torch
    from torch.nn.functional import cross_entropy

    rng = random.Random(f"warm-up|{seed}")
    ramp_steps = max(1, shape.steps // 20)

    def lr_factor(step: int) -> float:
        left = (shape.steps - step) / max(1, shape.steps - ramp_steps)
        return min((step + 1) / ramp_steps, 0.1 + 0.9 * left)

    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(tokenizer, shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=shape.peak_lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
        for step in range(shape.steps):
            rows = [row(rng) for _ in range(shape.batch)]
            width = max(len(ids) for ids, _ in rows)
            # Padding stands right of everything that is trained, where causal attention does not see it.
            ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
            labels_BT = torch.tensor([labels + [IGNORE] * (width - len(labels)) for _, labels in rows])[:, 1:]
            hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
            trained_BT = labels_BT != IGNORE
            loss = cross_entropy(model.lm_head(hidden_BTH[trained_BT]), labels_BT[trained_BT])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress(step + 1, shape.steps, loss.item())
    return model.eval()


def _new_model(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    vocabulary = tokenizer.get_vocab()
    heads = shape.hidden // 32
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocabulary),
            hidden_size=shape.hidden,
            intermediate_size=3 * shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            head_dim=32,
            max_position_embeddings=shape.max_positions,
            tie_word_embeddings=True,
            eos_token_id=vocabulary[END_OF_TURN],
            pad_token_id=vocabulary[CONTROL_TOKENS[0]],
            bos_token_id=None,
        )
    )


@contextmanager
def _one_thread() -> Generator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
