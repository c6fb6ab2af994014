"""The embedded engine serves one model in one process, on one scheduler thread: base by transformers, LoRAs by PEFT.

The HTTP endpoint hands in requests by policy name and receives the pieces of the answer on its event loop. Policies are
loaded and unloaded while requests run; the weights behind a policy's name never change.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from art_patch import policies
from art_patch.errors import ConfigError, ModelNotFound
from art_patch.serving.contract import Overloaded, check_new, check_unload, unknown_model
from art_patch.serving.embedded.chat_endpoint import ChatEndpoint
from art_patch.serving.embedded.chat_request import Grammars
from art_patch.serving.embedded.generation import Generation
from art_patch.serving.embedded.lora_bank import make_bank
from art_patch.serving.embedded.scheduler import EngineLimits, Policy, Scheduler
from art_patch.serving.embedded.text import PromptEncoder


class EmbeddedEngine:
    """Serves a base model and LoRA adapters for it, each under a policy name, in this process."""

    def __init__(
        self, model: Any, tokenizer: Any, base: policies.BaseModel, name: str, adapters_root: str | os.PathLike[str],
        limits: EngineLimits, merge: bool | None,
    ) -> None:  # fmt: skip
        """Takes over a loaded model in eval mode and starts the scheduler; `from_pretrained` loads the model, too."""
        self.limits = limits
        self.base = base
        self.base_policy = policies.check_name(f"{name}@0")
        # A model without position embeddings (recurrent, ALiBi) names no limit.
        context = int(getattr(model.config, "max_position_embeddings", 0) or 1 << 30)
        self.max_model_len = min(context, limits.max_model_len or context)
        self.adapters_root = Path(adapters_root).resolve()
        self._model = model
        self._bank = make_bank(model, merge)
        self._policies = {self.base_policy: Policy(self.base_policy)}
        self._loading: set[str] = set()
        self.prompts = PromptEncoder(tokenizer)
        self._scheduler = Scheduler(model, self._bank, self.prompts, _stop_ids(model, tokenizer), limits)
        self._lock = self._scheduler.lock
        self._grammars = Grammars(tokenizer)
        self.chat = ChatEndpoint(
            self.prompts, self._grammars, self.max_model_len, limits.max_rows, self.policies, self.submit
        )

    @classmethod
    def from_pretrained(
        cls, base: str | os.PathLike[str], *, name: str = "agent", adapters_root: str | os.PathLike[str],
        device: str = "auto", dtype: str = "auto", limits: EngineLimits | None = None, merge: bool | None = None,
    ) -> EmbeddedEngine:  # fmt: skip
        """Loads a base model and starts an engine on it, or raises `ModelNotFound`.

        Args:
            base: directory of the base model, or its Hugging Face id.
            device: a torch device, or `auto`: CUDA if there is any, else the CPU.
            dtype: number type of the weights, or `auto`: float32 on the CPU, else the checkpoint's own type.
            merge: true keeps a merged copy of the weights for each LoRA, false uses PEFT's layers; see `make_bank`.
        """
        directory = policies.resolve_model_dir(base)
        checkpoint = policies.read_base_model(directory)
        model, tokenizer = _load_model(directory, device=device, dtype=dtype)
        return cls(model, tokenizer, checkpoint, name, adapters_root, limits or EngineLimits(), merge)

    @property
    def healthy(self) -> bool:
        """Whether the scheduler's thread runs and accepts requests."""
        return self._scheduler.healthy

    def policies(self) -> list[str]:
        """Returns the names of all served policies, the base model first."""
        with self._lock:
            return list(self._policies)

    def stats(self) -> dict[str, int]:
        """Returns the counts of `Scheduler.stats`."""
        return self._scheduler.stats()

    def submit(self, policy_name: str, generation: Generation, accepted_s: float | None = None) -> None:
        """Queues a request for a policy, as `Scheduler.submit` does; raises `UnknownPolicy` if it is not served."""
        with self._lock:
            policy = self._policies.get(policy_name)
            if policy is None:
                raise unknown_model(policy_name, self.policies())
            # Under the same lock as the look-up: the policy cannot be retired and freed in between.
            self._scheduler.submit(generation, policy, accepted_s)

    async def start(self) -> None:
        """Does nothing: the constructor has started the scheduler."""

    async def stop(self) -> None:
        """Stops the scheduler's thread; unfinished requests fail, as with `close`."""
        self.close()

    async def load(self, name: str) -> None:
        """Validates the adapter in `adapters_root/name` and serves it while other requests run.

        Raises `AdapterRejected` if it is not valid or is served already, and `Overloaded` if another request loads the
        name now.
        """
        policies.check_name(name)
        with self._lock:
            if name in self._loading:  # 503 and not a refusal: on the next try it is served or refused with the reason
                raise Overloaded(f"{name} is being loaded; try again in a moment")
            check_new(name, self.policies())
            self._loading.add(name)
        try:
            # Validation reads and hashes whole files: in a thread, so that streams go on.
            adapter = await asyncio.to_thread(
                policies.validate_adapter, self.adapters_root, name, self.base, max_rank=self.limits.max_lora_rank
            )
            # Only the scheduler's thread may touch the model, and between two steps no forward is half done.
            await asyncio.wrap_future(self._scheduler.command(lambda: self._add(adapter)))
        finally:
            with self._lock:
                self._loading.discard(name)

    async def unload(self, name: str) -> None:
        """Stops serving a policy: new requests for it fail, running ones finish, then its memory is freed."""
        with self._lock:
            check_unload(name, self.policies())
            self._scheduler.retire(self._policies.pop(name))

    def close(self) -> None:
        """Stops the scheduler's thread; unfinished requests fail. A second call does nothing."""
        self._scheduler.close()
        self._grammars.close()

    def _add(self, adapter: policies.ValidatedAdapter) -> None:
        name = self._bank.add(adapter)
        # Proven before its name is served: no request may meet an adapter that computes something else.
        try:
            self._prove(adapter, name)
        except BaseException:
            self._bank.remove(name)  # the refused adapter must not keep its memory
            raise
        with self._lock:
            self._policies[adapter.name] = Policy(adapter.name, name)

    def _prove(self, adapter: policies.ValidatedAdapter, name: str) -> None:
        if (probe := adapter.probe) is not None:
            dtype = str(self._model.dtype).removeprefix("torch.")
            served = self._score(name, probe)
            policies.check_probe(adapter.name, probe, served, self._score(None, probe), dtype=dtype)

    def _score(self, name: str | None, probe: policies.Probe) -> list[float]:
        self._bank.activate(name)
        ids_1T = torch.tensor([probe.token_ids], device=self._model.device)
        targets_T1 = torch.tensor(probe.targets, device=self._model.device)[:, None]
        # In float32, as the `Sampler` computes the log-probabilities of answers.
        logprobs_TV = torch.log_softmax(self._model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float(), dim=-1)
        return logprobs_TV.gather(1, targets_T1).squeeze(1).tolist()


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    # Qwen, for one, ends a turn with one token and a text with another: the generation config names both, the tokenizer
    # only the first.
    ids: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = set(ids) if isinstance(ids, list) else {ids}
    return frozenset(int(token_id) for token_id in found | {tokenizer.eos_token_id} if token_id is not None)


_DTYPES = ("float32", "bfloat16", "float16")


def _load_model(directory: Path, *, device: str, dtype: str) -> tuple[Any, Any]:
    """Loads a causal language model and its tokenizer, ready for inference; `from_pretrained` explains the options."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype not in {"auto", *_DTYPES}:
        raise ConfigError(f"dtype {dtype!r} is unknown. Use auto, {', '.join(_DTYPES)}.")
    # Half precision is slow on many CPUs, and a merged bank is exact in float32 only.
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    disable_progress_bar()  # a server's log is no place for it
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = policies.load_model(directory, dtype=dtype)
        model.to(device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelNotFound(f"{directory} cannot be loaded: {error}") from error
    if not getattr(tokenizer, "chat_template", None):
        raise ModelNotFound(f"{directory} has no chat template. Use an instruction-tuned model, or add one.")
    model.eval().requires_grad_(False)
    return model, tokenizer
