"""The demo's base model: a Qwen3 of half a million parameters that half knows the shop. Made here, in about a minute.

`build_model(directory, seed=...)` writes an ordinary model directory (config, safetensors, tokenizer, chat template):
whatever serves or trains a real Qwen3 takes it unchanged.

- The weights come from a short SFT on *noisy* demonstrations (`WarmUp`): the model knows how a tool call looks and what
  to do with the result, but often does something else. It asks traffic triples only (see `shop`).
- Prompts are made by `tokenizer.apply_chat_template(messages, tools=tools, ...)` and in no other way. The template has
  Qwen3's layout, so that a rendered tool call is, token for token, the tool call that was sampled.
- Same seed, same warm-up: same weights. One thread is used, whatever torch is set to, because sums depend on it.
- A directory is complete or absent: it is written beside its place, then renamed. A complete one is returned at once;
  one that holds something else is an error, never overwritten.

Torch and transformers are imported by the functions that need them.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_patch.demo.shop import COUNTS, ITEMS, PRICES, TOOLS, traffic_prices, triples
from art_patch.demo.tiny_tokenizer import CONTROL_TOKENS, END_OF_TURN, asked, called, make_tokenizer, result, said
from art_patch.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

Progress = Callable[[int, int, float], None]
"""Called as `progress(step, total, loss)` after each warm-up step; `step` counts from 1, `loss` is nats per token."""

_MARKER = "warm_up.json"
_IGNORE = -100


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What the warm-up teaches, and how long.

    Attributes:
        steps: optimizer steps.
        batch: demonstrations a step, each drawn anew.
        peak_lr: learning rate after a ramp of a twentieth of the steps; from there it falls to a tenth, linearly.
        p_call: share of demonstrations that look something up; the others make a price up and multiply it.
        p_item: share of the lookups that look up the item that was asked for.
        p_multiply: share of the final answers that are count times price. The others are count *plus* price: as the
            larger share they are what the model says greedily, so learning has to change its mind, not only its noise.
    """

    steps: int = 600
    batch: int = 48
    peak_lr: float = 2e-3
    p_call: float = 0.8
    p_item: float = 0.9
    p_multiply: float = 0.4


def build_model(directory: Path, *, seed: int, warm_up: WarmUp | None = None, progress: Progress | None = None) -> Path:
    """Makes the base model in `directory`, unless it is there already.

    Args:
        directory: where the model goes; its parent is created.
        seed: of the weights and of the demonstrations.
        warm_up: how to train it; the demo's own where not given.
        progress: told about each step.

    Returns:
        `directory`.

    Raises:
        ConfigError: `directory` holds something other than this model.
    """
    warm_up = warm_up or WarmUp()
    recipe = {"seed": seed, **asdict(warm_up)}
    if directory.exists():
        if not _is_complete(directory, recipe):
            raise ConfigError(f"{directory} is not the demo model of {recipe}: remove it, or name another directory")
        return directory
    from transformers.utils.logging import disable_progress_bar

    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        tokenizer = make_tokenizer()
        model = _train(tokenizer, seed, warm_up, progress)
        disable_progress_bar()
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
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


def _is_complete(directory: Path, recipe: dict[str, Any]) -> bool:
    marker = directory / _MARKER
    return marker.is_file() and json.loads(marker.read_text()) == recipe


@dataclass(frozen=True, slots=True)
class _Turns:
    """Token ids of the shop's turns. Joined, they are what the template makes of the whole conversation.

    Rendering every demonstration anew would take as long as training. The parts can be joined because each begins and
    ends with a token that merges with nothing.

    Attributes:
        asked: by count and item: the prompt of the first turn.
        called: by item: what the model says to look it up, and the template's newline.
        result: by price: from there to the prompt of the second turn.
        said: by number: what the model says to give it as the answer, and the template's newline.
    """

    asked: dict[tuple[int, str], list[int]]
    called: dict[str, list[int]]
    result: dict[int, list[int]]
    said: dict[int, list[int]]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> _Turns:
        render: Any = tokenizer.apply_chat_template

        def ids(*messages: dict[str, Any], prompt: bool) -> list[int]:
            return render(list(messages), tools=TOOLS, add_generation_prompt=prompt, return_dict=False)

        ask, call = asked(COUNTS[0], ITEMS[0]), called(ITEMS[0])
        turn_1, turn_2 = len(ids(ask, prompt=True)), len(ids(ask, call, prompt=False))
        numbers = {count * price for count in COUNTS for price in PRICES}
        numbers |= {count + price for count in COUNTS for price in PRICES}
        return cls(
            asked={(count, item): ids(asked(count, item), prompt=True) for count in COUNTS for item in ITEMS},
            called={item: ids(ask, called(item), prompt=False)[turn_1:] for item in ITEMS},
            result={price: ids(ask, call, result(price), prompt=True)[turn_2:] for price in PRICES},
            said={number: ids(ask, said(str(number)), prompt=False)[turn_1:] for number in numbers},
        )

    def demonstration(self, warm_up: WarmUp, rng: random.Random) -> tuple[list[int], list[int]]:
        """A noisy conversation: its ids, and the same with everything that the model does not say set to `_IGNORE`."""
        count, item, price = rng.choice(triples("traffic"))
        if rng.random() < warm_up.p_call:
            if rng.random() >= warm_up.p_item:
                item_asked, item = item, rng.choice([other for other in ITEMS if other != item])
                price = rng.choice(traffic_prices(count, item))
            else:
                item_asked = item
            number = count * price if rng.random() < warm_up.p_multiply else count + price
            given = [(self.asked[count, item_asked], self.called[item]), (self.result[price], self.said[number])]
        else:
            given = [(self.asked[count, item], self.said[count * rng.choice(PRICES)])]
        ids: list[int] = []
        labels: list[int] = []
        for prompt, sampled in given:
            ids += prompt + sampled
            # The newline after the end of the turn is the template's, not the model's.
            labels += [_IGNORE] * len(prompt) + sampled[:-1] + [_IGNORE]
        return ids, labels


def _train(
    tokenizer: PreTrainedTokenizerFast, seed: int, warm_up: WarmUp, progress: Progress | None
) -> Qwen3ForCausalLM:
    """Supervised fine-tuning of all parameters, on the model's own tokens only."""
    import torch
    from torch.nn.functional import cross_entropy

    turns, rng = _Turns.of(tokenizer), random.Random(f"warm-up|{seed}")
    ramp_steps = max(1, warm_up.steps // 20)

    def lr_factor(step: int) -> float:
        left = (warm_up.steps - step) / max(1, warm_up.steps - ramp_steps)
        return min((step + 1) / ramp_steps, 0.1 + 0.9 * left)

    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(tokenizer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=warm_up.peak_lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
        for step in range(warm_up.steps):
            rows = [turns.demonstration(warm_up, rng) for _ in range(warm_up.batch)]
            width = max(len(ids) for ids, _ in rows)
            # Padding stands right of everything that is trained, where causal attention does not see it.
            ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
            labels_BT = torch.tensor([labels + [_IGNORE] * (width - len(labels)) for _, labels in rows])[:, 1:]
            hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
            trained_BT = labels_BT != _IGNORE
            loss = cross_entropy(model.lm_head(hidden_BTH[trained_BT]), labels_BT[trained_BT])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress(step + 1, warm_up.steps, loss.item())
    return model.eval()


def _new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    vocabulary = tokenizer.get_vocab()
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocabulary),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
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
