"""All vLLM replicas as one engine: keeps the same policies in each replica, and chooses a replica for each request.

A policy is served once every replica that takes requests has loaded it and proven its training's log-probabilities; a
replica that is being restarted takes none before that. A request whose replica is full or fails before the first byte
goes to another one; if there is none, the caller gets 429 or 503. After the first byte, the connection is closed
without completing the response, so that no client takes a partial answer for a complete one.
"""

import asyncio
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp

from art_patch._lib.asgi import ApiError, Caller
from art_patch._lib.atomic_files import placing
from art_patch._lib.loose_json import as_object
from art_patch._lib.process import is_alive, own_name
from art_patch.errors import AdapterRejected, EngineError
from art_patch.policies import CONFIG, WEIGHTS, BaseModel, ValidatedAdapter, check_name, validate_adapter
from art_patch.serving.contract import EngineFull, Overloaded, check_new, check_unload, unknown_model
from art_patch.serving.request_checks import ChatRoute, accepted_wait_s, parse_object, refuse_unsupported
from art_patch.serving.vllm.process import VllmOptions, VllmProcess, command_line, sweep, variables_of
from art_patch.serving.vllm.replica import NOT_A_NUMBER, Loaded, Poisoned, Replica, Unreachable

_log = logging.getLogger(__name__)

_COPIES = "served-"

# A replica may have 1.5 times its share of the running requests, plus 4, before a conversation goes to another one.
_UNEVEN, _SLACK = 1.5, 4


class VllmEngine:
    """Serves a base model and LoRA adapters for it, each under a policy name, with one or several vLLM processes."""

    def __init__(
        self, options: VllmOptions, base: BaseModel, *, adapters_root: str | os.PathLike[str], home: Path,
        replicas: int = 1, gpus: Sequence[Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        """Creates the engine without starting a process; `start` starts the vLLM processes.

        Args:
            home: directory for logs and for copies of the adapters; created if it is missing.
            gpus: the GPUs of each replica; with `None`, `CUDA_VISIBLE_DEVICES` decides.
        """
        self.base = base
        self.base_policy = check_name(f"{options.name}@0")
        self.adapters_root = Path(adapters_root).resolve()
        self.chat = Forward(self)
        self._options, self._home = options, home
        self._policies: dict[str, Loaded] = {}
        self._base_loaded = Loaded(self.base_policy, base.directory)
        self._lock = asyncio.Lock()  # held while policies or the replicas that take traffic change
        self._leaving: dict[str, Loaded] = {}  # unloaded, and still answering what had begun
        self._draining: set[asyncio.Task[None]] = set()
        # A unix socket's path may have no more than about 100 bytes, so it cannot lie below `home`.
        self._sockets = Path(tempfile.mkdtemp(prefix="art-patch-vllm-"))
        self._copies = home / f"{_COPIES}{own_name()}"

        def replica(number: int) -> Replica:
            socket, log = self._sockets / f"{number}.sock", home / f"vllm-{number}.log"
            variables = variables_of(options, os.environ, gpus=None if gpus is None else gpus[number])
            start = partial(VllmProcess, command_line(options, socket), variables, log=log, home=home)
            named = (self.base_policy, options.dtype)
            return Replica(number, *named, socket, start, self._catch_up, ready_timeout_s=600.0)

        self.replicas = [replica(number) for number in range(replicas)]

    @property
    def healthy(self) -> bool:
        """Whether at least one replica takes requests."""
        return any(replica.ready for replica in self.replicas)

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens, prompt and answer together, that every replica accepts."""
        return min(replica.max_model_len for replica in self.replicas)

    def policies(self) -> list[str]:
        """Returns the names of all served policies, the base model first."""
        return [self.base_policy, *self._policies]

    def stats(self) -> dict[str, int]:
        """Returns four counts: requests being answered, replicas ready and starting, restarts of vLLM processes."""
        ready = sum(replica.ready for replica in self.replicas)
        return {
            "running": sum(replica.running for replica in self.replicas),
            "ready": ready,
            "starting": len(self.replicas) - ready,
            "restarts": sum(max(0, replica.restarts) for replica in self.replicas),
        }

    async def start(self) -> None:
        """Starts every replica and returns when all of them take requests; raises as `Replica.boot` does."""
        self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if swept := await asyncio.to_thread(sweep, self._home):
            _log.warning("%d processes that an earlier server had left behind were ended", swept)
        for left in self._home.glob(f"{_COPIES}*"):
            if not is_alive(left.name.removeprefix(_COPIES)):  # no vLLM that knows them is left
                await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
        self._copies.mkdir(mode=0o700, exist_ok=True)
        await asyncio.gather(*(replica.boot() for replica in self.replicas))
        for replica in self.replicas:
            replica.supervise()

    async def stop(self) -> None:
        """Ends every replica, each as soon as it has finished its running requests."""
        for task in self._draining:
            task.cancel()
        await asyncio.gather(*(replica.stop() for replica in self.replicas))
        self.close()

    def close(self) -> None:
        """Kills every replica and deletes this engine's copies of the adapters; a second call does nothing."""
        for replica in self.replicas:
            replica.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)
        shutil.rmtree(self._copies, ignore_errors=True)

    async def load(self, name: str) -> None:
        """Validates an adapter, loads and tests it in every ready replica; raises `AdapterRejected`, `Overloaded`."""
        check_name(name)
        async with self._lock:
            check_new(name, self.policies())
            adapter = await asyncio.to_thread(
                validate_adapter, self.adapters_root, name, self.base, max_rank=self._options.max_lora_rank
            )
            policy = Loaded(name, await asyncio.to_thread(self._copy, adapter), adapter.probe)
            if (leaving := self._leaving.get(name)) is None:
                await self._load_everywhere(policy)
            elif leaving.directory == policy.directory:  # unloaded a moment ago, and still answering
                policy = leaving
            else:
                why = "still answers requests with other weights. Publish them as the next step."
                raise AdapterRejected(f"{name} {why}")
            self._policies[name] = policy

    async def unload(self, name: str) -> None:
        """Stops serving a policy: new requests for it fail, running ones finish, then the replicas unload it."""
        check_unload(name, self.policies())
        # Popped, so that no new request gets it; the replicas drop it when the last running one is done.
        policy = self._leaving[name] = self._policies.pop(name)
        task = asyncio.create_task(self._drop(policy))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    @contextmanager
    def answering(self, name: str) -> Generator[Loaded]:
        """Keeps the policy `name` loaded while the block answers a request; raises `UnknownPolicy` if it is unknown."""
        policy = self._base_loaded if name == self.base_policy else self._policies.get(name)
        if policy is None:
            raise unknown_model(name, self.policies())
        policy.running += 1
        try:
            yield policy
        finally:
            policy.running -= 1
            if not policy.running:
                policy.idle.set()

    def choose(self, conversation: bytes, tried: Sequence[Replica] = ()) -> Replica | None:
        """Returns a conversation's replica by hash, `None` if all are `tried`; a busy one passes new requests on."""
        ready = [replica for replica in self.replicas if replica.ready and replica not in tried]
        if len(ready) < 2:
            return ready[0] if ready else None
        # Agents often begin alike, so without this bound one replica could get nearly all conversations ("Consistent
        # hashing with bounded loads", Mirrokni et al. 2016).
        bound = _UNEVEN * sum(replica.running for replica in ready) / len(ready) + _SLACK
        # Rendezvous hashing: if a replica leaves, only its own conversations move to others, and prefix caches stay
        # warm.
        ranked = sorted(ready, key=lambda r: hashlib.blake2b(conversation, key=str(r.number).encode()).digest())
        return next((replica for replica in ranked if replica.running <= bound), ranked[0])

    async def reload(self, replica: Replica, policy: Loaded) -> None:
        """Loads a served policy again into a replica whose vLLM answered that it does not know the policy."""
        async with self._lock:
            if self._policies.get(policy.name) is policy and replica.ready:
                await replica.load(policy)

    async def _load_everywhere(self, policy: Loaded) -> None:
        # One replica after the other: if the policy spoils the first one, the others go on serving.
        loaded: list[Replica] = []
        for replica in self.replicas:
            if not replica.ready:
                continue
            try:
                await replica.load(policy)
                loaded.append(replica)
            except Unreachable as error:
                replica.condemn(str(error))  # it catches up when it is back
            except EngineError as error:
                if isinstance(error, Poisoned):
                    replica.condemn(f"{policy.name} spoiled it")
                for other in [*loaded, replica]:
                    if other.ready:
                        await other.unload(policy.name)
                if isinstance(error, AdapterRejected):
                    raise
                # Final only if its numbers are not finite; a time-out may not repeat.
                raise AdapterRejected(f"{policy.name}: {error}", final=isinstance(error, Poisoned)) from error
        if not loaded:
            raise Overloaded("vLLM is being started again; try again in a moment")

    async def _catch_up(self, replica: Replica) -> None:
        async with self._lock:
            for policy in self._policies.values():
                await replica.load(policy)
            replica.ready = True  # still under the lock: no policy can be added between its last load and this

    async def _drop(self, policy: Loaded) -> None:
        while policy.running:
            policy.idle.clear()
            await policy.idle.wait()
        async with self._lock:
            self._leaving.pop(policy.name, None)  # unloaded, loaded and unloaded again, it leaves twice
            if policy.name not in self._policies:
                for replica in self.replicas:
                    if replica.ready:
                        await replica.unload(policy.name)

    def _copy(self, adapter: ValidatedAdapter) -> Path:
        """Writes the bytes that were checked into a directory of our own, and returns it."""
        # vLLM's prefix cache goes by name and path, and it may read a file again at any time. So it gets a copy of the
        # very bytes that were checked, under a name that holds their hash: other content never has the same path.
        content = hashlib.sha256(adapter.weights + json.dumps(adapter.config, sort_keys=True).encode()).hexdigest()
        directory = self._copies / f"{adapter.name}-{content[:16]}"
        if not directory.exists():
            with placing(directory) as made:
                (made / CONFIG).write_text(json.dumps(adapter.config))
                (made / WEIGHTS).write_bytes(adapter.weights)
        return directory


_PASSED = ("content-type", "content-length", "cache-control")


class Forward(ChatRoute[tuple[bytes, str, bytes, int]]):
    """ASGI application that answers chat completions by forwarding them to vLLM; one instance answers all requests."""

    def __init__(self, engine: "VllmEngine") -> None:
        super().__init__()
        self._engine = engine

    def understand(self, body: bytes) -> tuple[bytes, str, bytes, int]:
        """Returns the body, the name of the policy that is asked, the conversation's beginning, and `rows_of`."""
        fields = parse_object(body)
        return body, check_request(fields), conversation_of(fields), rows_of(fields)

    def policy_of(self, request: tuple[bytes, str, bytes, int]) -> str:
        """Returns the name that a request asks for."""
        return request[1]

    async def answer(self, caller: Caller, request: tuple[bytes, str, bytes, int]) -> None:
        """Asks one replica after another until the caller has its answer."""
        body, model, conversation, rows = request
        accepted_s, full = accepted_wait_s(caller), None
        tried: list[Replica] = []
        with self._engine.answering(model) as policy:
            while (replica := self._engine.choose(conversation, tried)) is not None:
                tried.append(replica)
                try:
                    replica.occupancy.check(rows, accepted_s)
                except EngineFull as error:
                    full = error
                    continue
                replica.occupancy.rows += rows
                try:
                    if await self._ask(caller, replica, policy, body):
                        return
                finally:
                    replica.occupancy.rows -= rows
        raise full or ApiError(503, "no vLLM takes requests just now; it is being started again", code="overloaded")

    async def _ask(self, caller: Caller, replica: Replica, policy: Loaded, body: bytes, *, again: bool = True) -> bool:
        """Returns whether the caller got its answer; if not, another replica may be asked."""
        replica.running += 1
        try:
            async with replica.link.chat(body) as response:
                if response.status == 200:
                    await _pass_on(caller, response)
                    return True
                return await self._refused(caller, replica, policy, body, response, again=again)
        except (aiohttp.ClientError, OSError) as error:
            if caller.started:
                # Returning without an end has the server close the connection, which is what the caller must see.
                _log.warning("an answer of %s broke off: %s", policy.name, error)
            return caller.started
        finally:
            replica.running -= 1

    async def _refused(
        self, caller: Caller, replica: Replica, policy: Loaded, body: bytes, response: Any, *, again: bool
    ) -> bool:
        content: bytes = await response.read()
        # Not one bad request: the process may answer everybody with NaN from now on, so it is restarted.
        if NOT_A_NUMBER in content:
            replica.condemn("it answered with numbers that are not finite")
            return False
        if response.status >= 500:
            return False
        if response.status == 404 and again:  # the engine serves it, so this replica has lost it
            try:
                await self._engine.reload(replica, policy)
            except EngineError as error:
                replica.condemn(f"it lost {policy.name}: {error}")
                return False
            return await self._ask(caller, replica, policy, body, again=False)
        self.log_refusal(response.status, content[:500].decode(errors="replace"))
        await caller.answer(response.status, [(b"content-type", b"application/json")], content)
        return True


async def _pass_on(caller: Caller, response: Any) -> None:
    given = response.headers
    await caller.begin(200, [(name.encode(), given[name].encode("latin-1")) for name in _PASSED if name in given])
    # Whatever has arrived goes out at once: a streamed token must not wait for a full buffer.
    async for chunk in response.content.iter_any():
        await caller.write(chunk)
    await caller.end()


# Other fields are refused: vLLM ignores fields that it does not know, so an answer could silently differ from what was
# asked for. `prompt_logprobs` and `echo` are left out on purpose: with a LoRA in the batch vLLM 0.32 ends over them,
# and all its running answers with it.
_UNDERSTOOD = frozenset({
    "add_generation_prompt", "allowed_token_ids", "bad_words", "chat_template_kwargs", "continue_final_message",
    "frequency_penalty", "ignore_eos", "include_reasoning", "include_stop_str_in_output", "logit_bias",
    "logprobs", "max_completion_tokens", "max_tokens", "messages", "min_p", "min_tokens", "model", "n",
    "parallel_tool_calls", "presence_penalty", "priority", "reasoning_effort",
    "repetition_penalty", "response_format", "return_token_ids", "seed", "skip_special_tokens",
    "spaces_between_special_tokens", "stop", "stop_token_ids", "stream", "stream_options", "structured_outputs",
    "temperature", "tool_choice", "tools", "top_k", "top_logprobs", "top_p", "truncate_prompt_tokens",
})  # fmt: skip


def check_request(fields: Mapping[str, Any]) -> str:
    """Checks the fields of a chat request and returns the policy name in `model`; raises an `ApiError` (400)."""
    given = {name: value for name, value in fields.items() if value is not None}
    refuse_unsupported(given, _UNDERSTOOD)
    model = given.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model must be a string", param="model")
    if not isinstance(given.get("messages"), list) or not given["messages"]:
        raise ApiError(400, "messages must be a list that is not empty", param="messages")
    return model


def rows_of(fields: Mapping[str, Any]) -> int:
    """Returns how many rows of a vLLM a request takes, which is one for each choice; 0 if it waits for apps."""
    n, priority = fields.get("n"), fields.get("priority")
    return 0 if isinstance(priority, int) and priority > 0 else n if isinstance(n, int) else 1


def conversation_of(fields: Mapping[str, Any]) -> bytes:
    """Returns the messages before the assistant's first answer: they are the same in every call of a conversation."""
    roles = ("system", "developer", "user")
    opening = takewhile(lambda message: as_object(message).get("role") in roles, fields["messages"])
    return json.dumps(list(opening)).encode()
