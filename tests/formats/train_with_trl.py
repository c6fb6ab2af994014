"""Trains one step on each exported file with TRL's own trainers. Run by `test_trl.py` in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.support.tiny import make_tiny_model


def main(directory: Path) -> None:
    model_directory = make_tiny_model(directory / "model", hidden=32, vocab_size=512)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    common: dict[str, Any] = {
        "output_dir": str(directory / "out"), "max_steps": 1, "per_device_train_batch_size": 2, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    told: dict[str, Any] = {}
    for file in sorted(directory.glob("*.jsonl")) + sorted(directory.glob("*.parquet")):
        kind = "json" if file.suffix == ".jsonl" else "parquet"
        rows = datasets.load_dataset(kind, data_files=str(file), split="train", cache_dir=str(directory / "cache"))
        given: dict[str, Any] = {
            "model": AutoModelForCausalLM.from_pretrained(model_directory),
            "train_dataset": rows,
            "processing_class": tokenizer,
        }
        match file.stem:
            case "chat" | "sft" | "sft-prompt":
                trainer: Any = SFTTrainer(args=SFTConfig(max_length=512, **common), **given)
            case "preference":
                trainer = DPOTrainer(args=DPOConfig(max_length=1024, **common), **given)
            case _:
                config = GRPOConfig(num_generations=2, max_completion_length=4, **common)
                trainer = GRPOTrainer(
                    args=config, reward_funcs=lambda prompts, **_: [0.5 * i for i in range(len(prompts))], **given
                )
        trainer.train()
        told[file.name] = {"rows": len(rows), "first": rows[0], "step": trainer.state.global_step}
        if file.stem.startswith("sft"):
            told[file.name]["text"] = [tokenizer.decode(row["input_ids"]) for row in trainer.train_dataset]
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
