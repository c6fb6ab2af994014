"""Small base models that solve a task some of the time, for users without a GPU: Qwen3 with half a million parameters.

`make_model` trains a model on demonstrations and writes a standard model directory (config, safetensors, tokenizer,
chat template). Any program that works with a real Qwen3 can serve or train it unchanged. `tiny_base` makes such a model
from conversations alone and keeps it in the user's cache. The tokenizers follow Qwen3's layout and need few tokens for
the words of one task.

- The same seed, demonstrations and shape give the same weights.
- A model directory is complete or does not exist. If it is complete, it is returned without training; if it holds other
  content, an error is raised and nothing is overwritten.

Tensor axes: B demonstrations, T tokens, H features. Functions that need torch and transformers import them.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_patch._lib.atomic_files import placing
from art_patch.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

# Called as `progress(step, total, loss)` after each warm-up step; `step` counts from 1, `loss` is nats per token.
Progress = Callable[[int, int, float], None]

# A demonstration's ids, and the same ids with `IGNORE` in place of all tokens that are not the model's.
Row = tuple[list[int], list[int]]

Conversation = Sequence[dict[str, Any]]  # OpenAI messages; the model is trained on the assistant's alone

IGNORE = -100
END_OF_TURN = "<|im_end|>"
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
# Not "special", as in Qwen3: decoding must keep them, a tool-call parser reads them.
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content + '\\n\\n' if messages[0].role == 'system' }}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {%- set function = tool.function or tool %}
        {{- '\\n{"type": "function", "function": {"name": ' + (function.name | tojson) }}
        {{- ', "description": ' + (function.description | tojson) if function.description }}
        {{- ', "parameters": ' + (function.parameters | tojson) + '}' + '}' }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nCall one with\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n' if content or not loop.first }}
            {%- set function = tool_call.function or tool_call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""
# Qwen3's layout without `<think>`, with fewer words around the tools, so that the prompt stays short. A tool is written
# key by key, where Qwen3 writes all keys: a server may add keys (`"strict": null`), and a model this small answers
# nothing sensible to a prompt that it was not trained on (measured: success falls from .26 to 0).

_MARKER = "warm_up.json"
_REMEMBERED = 50_000  # demonstrations whose tokens are kept, as rendering one takes half as long as learning it
_LOOKED_AT = 200  # demonstrations that a tokenizer is made from, and by which a cached model is recognised


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a tiny model, and the number and size of its training steps."""

    steps: int = 600
    batch: int = 48  # demonstrations in a step, each drawn anew
    # Learning rate after a ramp of a twentieth of the steps; from there it falls linearly to a tenth.
    peak_lr: float = 2e-3
    layers: int = 2  # number of transformer blocks
    hidden: int = 128  # size of the residual stream; a head has 32 of it, an MLP three times as much
    max_positions: int = 1024  # most tokens of prompt and answer together


def tiny_base(
    name: str,
    demonstration: Callable[[random.Random], Conversation],
    *,
    seed: int,
    words: Sequence[str] = (),
    tools: Sequence[dict[str, Any]] = (),
    shape: Shape | None = None,
) -> Path:
    """Makes a base model trained on demonstrations of a task, unless the cache has it, and returns its directory.

    The progress of the training is printed to stderr.

    Args:
        demonstration: draws one conversation in which the task is done as well, or as badly, as the model is meant to
            do it.
        words: strings that the tokenizer makes one token each, wherever they occur.
        shape: size of the model and of its training; the default suits a task of a few turns.
    """
    from platformdirs import user_cache_path

    shape = shape or Shape()
    rng = random.Random("looked at")
    samples = [list(demonstration(rng)) for _ in range(_LOOKED_AT)]
    told = json.dumps([samples, list(words), list(tools), asdict(shape)], sort_keys=True)
    digest = hashlib.sha256(told.encode()).hexdigest()
    directory = user_cache_path("art-patch") / "tiny" / f"{name}-{seed}-{digest[:12]}"

    def drawn(tokenizer: PreTrainedTokenizerFast) -> Callable[[random.Random], Row]:
        @lru_cache(_REMEMBERED)
        def row(line: str) -> Row:
            return row_of(tokenizer, json.loads(line), tools)

        return lambda rng: row(json.dumps(demonstration(rng)))

    def progress(step: int, total: int, loss: float) -> None:
        if step % 100 == 0 or step == total:
            print(f"tiny base model: step {step} of {total}, loss {loss:.3f}", file=sys.stderr)

    recipe = {"name": name, "seed": seed, "demonstrations": digest}
    tokenizer = partial(conversation_tokenizer, samples, words=words, tools=tools)
    return make_model(directory, recipe, tokenizer, drawn, seed=seed, shape=shape, progress=progress)


def make_model(
    directory: Path,
    recipe: dict[str, Any],
    tokenizer: Callable[[], PreTrainedTokenizerFast],
    rows: Callable[[PreTrainedTokenizerFast], Callable[[random.Random], Row]],
    *,
    seed: int,
    shape: Shape,
    progress: Progress | None = None,
) -> Path:
    """Trains a model and writes it to `directory`, unless it is there already; returns `directory`.

    `recipe` is stored there and compared on the next call: a `ConfigError` if it differs. `rows` takes the tokenizer
    and returns a function that draws the tokens of one demonstration.
    """
    if directory.exists():
        if not _is_complete(directory, recipe):
            raise ConfigError(f"{directory} is not the tiny model of {recipe}: remove it, or name another directory")
        return directory
    from transformers.utils.logging import disable_progress_bar

    made = tokenizer()
    model = _train(made, rows(made), seed, shape, progress)
    disable_progress_bar()
    try:
        with placing(directory, mode=0o755) as unfinished:  # a server of another user must read it
            model.save_pretrained(unfinished)
            made.save_pretrained(unfinished)
            (unfinished / _MARKER).write_text(json.dumps(recipe))
    except ConfigError:
        # A process that made the same model may have been faster; its directory is as good as ours.
        if not _is_complete(directory, recipe):
            raise
    return directory


def row_of(tokenizer: PreTrainedTokenizerFast, conversation: Conversation, tools: Sequence[dict[str, Any]]) -> Row:
    """Returns a conversation's token ids and labels: the assistant's tokens, with its ends of turns, are trained on."""
    render: Any = tokenizer.apply_chat_template
    ids: list[int] = render(list(conversation), tools=list(tools) or None, return_dict=False)
    opening: list[int] = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    end: Any = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    labels = [IGNORE] * len(ids)
    for begin in range(len(opening), len(ids)):
        if ids[begin - len(opening) : begin] == opening:
            after = ids.index(end, begin) + 1
            labels[begin:after] = ids[begin:after]
    return ids, labels


def _is_complete(directory: Path, recipe: dict[str, Any]) -> bool:
    marker = directory / _MARKER
    return marker.is_file() and json.loads(marker.read_text()) == recipe


def _train(
    tokenizer: Any, row: Callable[[random.Random], Row], seed: int, shape: Shape, progress: Progress | None
) -> Qwen3ForCausalLM:
    """Trains all parameters of a new model by supervised fine-tuning, on the assistant's tokens only."""
    import torch
    from torch.nn.functional import cross_entropy

    rng = random.Random(f"warm-up|{seed}")
    ramp_steps = max(1, shape.steps // 20)

    def lr_factor(step: int) -> float:
        left = (shape.steps - step) / max(1, shape.steps - ramp_steps)
        return min((step + 1) / ramp_steps, 0.1 + 0.9 * left)

    # One thread, whatever torch is set to: the order of sums depends on it, and so would the weights.
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
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=shape.hidden, intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), head_dim=32,
        max_position_embeddings=shape.max_positions, tie_word_embeddings=True, eos_token_id=vocabulary[END_OF_TURN],
        pad_token_id=vocabulary[CONTROL_TOKENS[0]], bos_token_id=None,
    ))  # fmt: skip


@contextmanager
def _one_thread() -> Generator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_tokenizer(
    texts: Sequence[str], words: Sequence[str], *, whole_phrases: bool = False
) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer that can encode any text, and needs few tokens for the rendered `texts`.

    Args:
        words: strings that become one token each, like every digit; the model can then copy one in a single step.
        whole_phrases: true merges across words and lines up to the next tag, digit or word of `words`, for a task that
            repeats the same phrases. False keeps words and lines apart, so that a prompt's tokens do not depend on the
            text after it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    digits = pre_tokenizers.Digits(individual_digits=True)
    text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole_phrases)
    lines = [] if whole_phrases else [pre_tokenizers.Split("\n", "isolated")]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*lines, digits, text])
    bpe.decoder = decoders.ByteLevel()
    added = (*CONTROL_TOKENS, *TAGS, *words)
    longest_first = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    pieces = [piece for text in texts for piece in re.split(longest_first, text) if piece]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than there is to merge in a small task: training ends when every piece is one token
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(CONTROL_TOKENS),
        show_progress=False,
    )
    bpe.train_from_iterator(pieces, trainer)
    bpe.add_tokens([*TAGS, *words])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=CONTROL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def conversation_tokenizer(
    conversations: Sequence[Sequence[dict[str, Any]]], *, words: Sequence[str], tools: Sequence[dict[str, Any]]
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with few tokens for conversations with the same tools: a line about these is one token."""
    about_tools: list[str] = []
    if tools:
        system = rendered([{"role": "user", "content": ""}], tools).split(END_OF_TURN, 1)[0]
        tags = "|".join(map(re.escape, (*TAGS, *CONTROL_TOKENS)))
        about_tools = [line for line in re.split(f"{tags}|\n", system) if len(line) > 1]
    return make_tokenizer([rendered(each, tools) for each in conversations], [*words, *about_tools])


def rendered(conversation: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
    """Returns the text of a conversation with its tools, as the chat template writes it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    renderer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    return renderer.apply_chat_template(list(conversation), tools=list(tools) or None, tokenize=False)
