"""Starting from anything: what `art-patch train FILE` makes beside TRL, and what an adopted or forked LoRA computes.

::

    python tests/benchmarks/families_start.py [--json]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met. A tiny random base, in fp32 on the CPU; half a minute, and one more on the real vLLM where
`art-patch init vllm` made its environment.

- `sft_difference`, `sft_turns_difference`, `dpo_difference`: the same file (prompt and completion; messages of several
  turns; preferences) is given to `art-patch train` and to TRL's trainer, which start from the same LoRA and make the
  same three steps of AdamW. Largest difference of a weight of the two LoRAs, which both moved by `*_moved` at most.
- `adopted_difference_nats`: LoRAs that PEFT wrote, with other ranks, layers and scales than ours, are adopted. Largest
  difference of a log-probability between PEFT with the LoRA as it was, and PEFT with the policy.
- `forked_difference_nats`: the same of a policy and of its fork in another project.
- `served_difference_nats`: the real vLLM serves a fork, each adopted LoRA and what `art-patch train` made of a file,
  `served_policies` policies in all. Largest difference of a log-probability from the trainer's, on sampled answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch.pipeline.manual_moves import publish  # noqa: E402 - the line above makes tests importable
from art_patch.policies import BaseModel, base_fingerprint, read_base_model, read_lora  # noqa: E402
from art_patch.serving import EngineClient  # noqa: E402
from art_patch.serving.vllm.environment import find_vllm  # noqa: E402
from art_patch.settings import load_settings  # noqa: E402
from art_patch.store import open_store  # noqa: E402
from art_patch.training.loop.loading import load_policy  # noqa: E402
from art_patch.types import Policy  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402
from tests.support.command_line import art_patch  # noqa: E402
from tests.support.engines import make_vllm, serve  # noqa: E402
from tests.support.tiny import make_tiny_adapter, make_tiny_model  # noqa: E402
from tests.support.train_jobs import SMALL, weights_of  # noqa: E402

TARGETS = (
    Target("sft_difference", None, 1e-5, "of a weight, from TRL's SFTTrainer on prompts and completions"),
    Target("sft_turns_difference", None, 1e-5, "of a weight, from TRL's SFTTrainer on answers of several turns"),
    Target("dpo_difference", None, 1e-5, "of a weight, from TRL's DPOTrainer"),
    Target("forked_difference_nats", None, 1e-6, "of a log-probability, from the policy that was forked"),
    Target("adopted_difference_nats", None, 1e-6, "of a log-probability, from PEFT with the LoRA that was adopted"),
    Target("served_difference_nats", None, 1e-3, "of a log-probability, between the real vLLM and the trainer"),
)

# Without a newline behind an answer: TRL learns it, where a template writes one, and no policy ever samples it.
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
STEPS, RATE, BETA = 3, 1e-3, 0.1
WORDS = ("plum", "pear", "apple", "bread", "lemon", "onion")


def said(role: str, content: str) -> dict[str, str]:
    """One message."""
    return {"role": role, "content": content}


def asked(word: str) -> list[dict[str, str]]:
    """A prompt."""
    return [said("system", "you are a shop"), said("user", f"what is the price of a {word}?")]


PROMPTS = [
    {"prompt": asked(word), "completion": [said("assistant", f"a {word} is {n} cents")]} for n, word in enumerate(WORDS)
]
TURNS = [
    {
        "messages": [
            *asked(word), said("assistant", f"{n} cents"), said("user", "and two?"), said("assistant", f"{2 * n} cents")
        ]
    }
    for n, word in enumerate(WORDS)
]  # fmt: skip
PAIRS = [
    {
        "prompt": asked(word),
        "chosen": [said("assistant", f"{n} cents")],
        "rejected": [said("assistant", f"the customer asks how many {word}")],
    }
    for n, word in enumerate(WORDS)
]
FILES: Mapping[str, tuple[str, Sequence[Any]]] = {
    "sft": ("sft", PROMPTS),
    "sft_turns": ("sft", TURNS),
    "dpo": ("dpo", PAIRS),
}
"""Figure -> TRL's trainer, and the lines of the file."""


def make_base(directory: Path) -> Path:
    """A tiny model whose chat template marks what the assistant writes, as TRL needs it."""
    base = make_tiny_model(directory, hidden=32, vocab_size=320)
    (base / "chat_template.jinja").write_text(TEMPLATE)
    return base


def make_project(home: Path, base: Path) -> Path:
    """A project whose champion is `agent@1`, which has a LoRA; return the directory of that."""
    adapter = make_tiny_adapter(home / "default" / "adapters", base, "agent", 1)
    with closing(open_store(f"sqlite:///{home}/default/store.db")) as store:
        fingerprint = base_fingerprint(base)
        store.ledger.add_base("agent@0", str(base), fingerprint, who="test")
        policy = Policy("agent@1", str(base), fingerprint, "candidate", time.time(), str(adapter), "agent@0")
        store.ledger.add_candidate(policy, trained_on=[], who="test")
        store.ledger.move("agent@1", "champion", who="test", reason="test")
    return adapter


def written(path: Path, lines: Sequence[Any]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ours(file: Path, home: Path) -> dict[str, Tensor]:
    """The LoRA that `art-patch train` publishes, which steps on all lines at once."""
    options = ("--epochs", STEPS, "--minibatches", 1, "--warmup-steps", 0, "--learning-rate", RATE)
    done = art_patch("train", str(file), *map(str, options), "--json", home=home)
    assert done.returncode == 0, done.stderr
    return weights_of(home / "default" / "adapters" / json.loads(done.stdout)["policy"])


def trls(kind: str, file: Path, base: Path, adapter: Path) -> dict[str, Tensor]:
    """The LoRA that TRL's trainer makes of the same file, as the library itself loads it."""
    from datasets import load_dataset
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    rows = load_dataset("json", data_files=str(file), split="train", cache_dir=str(file.parent / "cache"))
    own: dict[str, Any] = {"beta": BETA} if kind == "dpo" else {"assistant_only_loss": "messages" in rows.column_names}
    kinds: dict[str, tuple[Any, Any]] = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}
    config, make = kinds[kind]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    arguments = config(
        output_dir=str(file.parent / "trl"), report_to=[], bf16=False, use_cpu=True, gradient_checkpointing=False,
        per_device_train_batch_size=len(rows), max_steps=STEPS, learning_rate=RATE, lr_scheduler_type="constant",
        optim="adamw_torch", adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, save_strategy="no",
        **own,
    )  # fmt: skip
    trainer: Any = make(
        model=PeftModel.from_pretrained(model, str(adapter), is_trainable=True),
        args=arguments,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(base),
    )
    trainer.train()
    return get_peft_model_state_dict(trainer.model, adapter_name="default")


def largest(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """The largest difference of a weight."""
    assert ones.keys() == others.keys()
    return max(float((ones[name].double() - others[name].double()).abs().max()) for name in ones)


def beside_trl(directory: Path, name: str) -> dict[str, float]:
    """Train on one of `FILES` in both ways; return how far the LoRAs moved, and are from one another."""
    kind, lines = FILES[name]
    base = make_base(directory / "base")
    adapter = make_project(directory / "home", base)
    file = written(directory / f"{name}.jsonl", lines)
    mine = ours(file, directory / "home")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's settings are transformers' old names
        theirs = trls(kind, file, base, adapter)
    return {f"{name}_difference": largest(mine, theirs), f"{name}_moved": largest(mine, weights_of(adapter))}


# --- a LoRA of PEFT ---

LORAS: Mapping[str, Mapping[str, Any]] = {
    "other rank and layers": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]},
    "all layers, rank-stabilised": {"r": 16, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    "layers by a pattern": {"r": 4, "lora_alpha": 4, "target_modules": r".*\.1\.self_attn\.[kv]_proj"},
    "one block": {"r": 4, "lora_alpha": 4, "target_modules": ["k_proj"], "layers_to_transform": [1]},
    "ranks and scales of its own": {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], "rank_pattern": {"up_proj": 12},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 2},
    },
}  # fmt: skip
"""Settings of `peft.LoraConfig`."""


def make_lora(directory: Path, base: Path, settings: Mapping[str, Any]) -> Path:
    """A random LoRA as PEFT itself saves it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers by old names
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        tuned: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in tuned.named_parameters():
                if "lora_B" in name:  # which is zero in a new one
                    weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        tuned.save_pretrained(directory)
    return directory


def adopted(lora: Path, base: BaseModel, adapters: Path) -> Path:
    """The directory of the policy `agent@1` that `policies import` makes of a LoRA."""
    copy = read_lora(lora, base)
    policy = Policy("agent@1", str(base.directory), base.sha256, "candidate", 1.0, None, None, {"imported": {}})
    publish(copy, policy, adapters / policy.name)
    return adapters / policy.name


def logprobs_of(base: Path, adapter: Path | None) -> Tensor:
    """What transformers and PEFT compute of every token, on a few texts."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, str(adapter))
        ids_BT = torch.randint(0, 320, (4, 32), generator=torch.Generator().manual_seed(1))
        # In fp64: of two sums in fp32 that are equal on paper, log-probabilities differ by 2e-6.
        return model.double().eval()(input_ids=ids_BT).logits.log_softmax(-1)


def adoption() -> dict[str, float]:
    """Adopt each of `LORAS`; return how far what they compute is from what they computed."""
    gaps: list[float] = []
    for name, settings in LORAS.items():
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            base = read_base_model(make_base(place / "base"))
            lora = make_lora(place / "lora", base.directory, settings)
            policy = adopted(lora, base, place / "adapters")
            theirs, ours = (logprobs_of(base.directory, each) for each in (lora, policy))
            gaps.append(float((theirs - ours).abs().max()))
            say(f"{name}: {gaps[-1]:.1e} nats")
    return {"adopted_difference_nats": max(gaps)}


def forking() -> dict[str, float]:
    """Fork a policy; return how far what the fork computes is from what the policy computes."""
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        base = make_base(home / "base")
        adapter = make_project(home, base)
        done = art_patch("policies", "fork", "agent@1", "--as", "other", "--json", home=home)
        assert done.returncode == 0, done.stderr
        copy = home / "other" / "adapters" / json.loads(done.stdout)["policy"]
        gap = float((logprobs_of(base, adapter) - logprobs_of(base, copy)).abs().max())
        return {"forked_difference_nats": gap}


# --- on the real vLLM ---


def begun_with(home: Path) -> tuple[Path, dict[str, str]]:
    """Make a project `other` that begins with a fork, adopted LoRAs and a file; return its base, and what each is."""
    base = make_base(home / "base")
    make_project(home, base)

    def named(*arguments: str | Path) -> str:
        done = art_patch(*arguments, "--json", home=home)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["policy"]

    found = {named("policies", "fork", "agent@1", "--as", "agent", "--into", "other"): "fork"}
    for number, (name, settings) in enumerate(LORAS.items()):
        lora = make_lora(home / f"lora-{number}", base, settings)
        found[named("policies", "import", lora, "--project", "other")] = name
    file = written(home / "chats.jsonl", PROMPTS)
    options = ("--epochs", str(STEPS), "--learning-rate", "1e-2", "--warmup-steps", "0")
    found[named("train", file, *options, "--project", "other")] = "trained on a file"
    return base, found


@contextmanager
def on_vllm(home: Path, base: Path, policies: Sequence[str]) -> Generator[EngineClient]:
    """The real vLLM with the policies of the project `other`."""
    engine = make_vllm(base, home / "other" / "adapters", home / "vllm")
    with closing(engine), serve(engine, policies=list(policies), ready_s=240) as running:
        yield running.client


def gap(client: EngineClient, base: Path, policy: str, adapter: Path) -> float:
    """Return the largest difference of a log-probability between an engine and the trainer, on a sampled answer."""
    answer = client.chat(
        model=policy, messages=asked("plum"), max_tokens=32, temperature=1.0, seed=3, logprobs=True,
        return_token_ids=True,
    )  # fmt: skip
    choice = answer["choices"][0]
    theirs = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
    given, said = answer["prompt_token_ids"], choice["token_ids"]
    with torch.inference_mode():
        model = load_policy(str(base), adapter, SMALL)
        logprob_TV = model(input_ids=torch.tensor([[*given, *said]])).logits[0, len(given) - 1 : -1].log_softmax(-1)
    ours = logprob_TV.gather(1, torch.tensor(said).unsqueeze(1)).squeeze(1)
    return float((ours - theirs).abs().max())


def on_the_real_vllm() -> dict[str, Any]:
    """Serve what projects begin with; return how far it is from the trainer."""
    settings = load_settings()
    if find_vllm(settings.vllm_python, settings.environments) is None:
        say("no environment with vLLM: art-patch init vllm")
        return {"served_policies": 0}
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        base, policies = begun_with(home)
        with on_vllm(home, base, list(policies)) as client:
            gaps = {name: gap(client, base, name, home / "other" / "adapters" / name) for name in policies}
    for name, what in policies.items():
        say(f"{what}: {gaps[name]:.1e} nats from the trainer on vLLM")
    return {"served_policies": len(gaps), "served_difference_nats": max(gaps.values())}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    metrics: dict[str, Any] = {}
    for name in FILES:
        with tempfile.TemporaryDirectory() as temporary:
            metrics |= (found := beside_trl(Path(temporary), name))
            say(f"{name}: {found}")
    metrics |= adoption() | forking() | on_the_real_vllm()
    finish(metrics, TARGETS, as_json=given.json)


if __name__ == "__main__":
    main()
