"""`art-patch serve` runs the engine, and writes its address to the store for the apps."""

from __future__ import annotations

import json
import logging
import re
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

import typer

from art_patch import metrics, pipeline, policies, promotion, serving, store
from art_patch._lib.events import event
from art_patch._lib.key_files import ADMIN_KEY_FILE, key_for_apps, made_key, read_key
from art_patch._lib.process import owning
from art_patch.cli import output
from art_patch.cli.commands.consent import tell_once
from art_patch.cli.commands.policies import UPKEEP, watch_beside
from art_patch.cli.logs import Log
from art_patch.cli.options import ActingProject
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ConfigError, StoreError
from art_patch.settings import Settings
from art_patch.types import Policy

_LAST_LOOK_S = 10.0  # how long the end waits for a look at the canary that has begun, or for another server


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options of the model, for both engines (vLLM and embedded). `None` means the engine's own default."""

    name: Annotated[str, Option("Name of the policies; they are served as NAME@STEP.")] = "agent"
    device: Annotated[str, Option("Device for the model: auto, cpu, cuda, cuda:1, ...")] = "auto"
    dtype: Annotated[str, Option("Precision: auto, float32, bfloat16 or float16.")] = "auto"
    threads: Annotated[int | None, Option("CPU threads. Default: all cores.", least=1)] = None
    max_model_len: Annotated[
        int | None, Option("Largest number of tokens of prompt and answer. Default: the model's own.", least=16)
    ] = None
    max_lora_rank: Annotated[
        int | None, Option("Largest rank of an adapter. Default: 16; 64 with the embedded engine.")
    ] = None


@dataclass(frozen=True, slots=True)
class VllmServer:
    """The options that apply only if the engine is vLLM."""

    PANEL: ClassVar[str] = "vLLM"

    replicas: Annotated[int | None, Option("Number of vLLM processes.", least=1)] = None
    tensor_parallel_size: Annotated[int | None, Option("GPUs of each replica.", least=1)] = None
    gpu_memory_utilization: Annotated[float | None, Option("Share of a GPU's memory to use.", least=0.05, most=1)] = (
        None
    )
    tool_parser: Annotated[str | None, Option("vLLM's --tool-call-parser. Default: by the model's type.")] = None


@command
def serve(
    base: Annotated[str, Option("Base model: a directory, or a Hugging Face id.")],
    model: ModelOptions,
    vllm: VllmServer,
    project: ActingProject,
    extra: Annotated[
        list[str] | None,
        typer.Argument(help="Further arguments for vLLM, after `--`.", show_default=False, metavar="VLLM_ARGUMENTS"),
    ] = None,
    engine: Annotated[str, Option("vllm, embedded, or auto: vLLM on a GPU, else embedded.")] = "auto",
    host: Annotated[str, Option("Address to listen on. Any but loopback requires a key.")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on; 0 takes a free one.", least=0, most=65535)] = 8700,
    api_key_file: Annotated[Path | None, Option("File, mode 600, with the key that callers must send.")] = None,
    advertise: Annotated[
        str | None, Option("Address that apps on other machines call, such as http://gpu1:8700.")
    ] = None,
    max_body_mib: Annotated[int, Option("Largest request body in MiB.", least=1)] = 16,
    take_over: Annotated[
        bool, Option("Let a policy answer every call from now on, although upstream's answers are on record.")
    ] = False,
    *,
    log: Log,
) -> None:
    """Serve the base model and its policies. Running apps of the project find the server in the store within a second.

    If the store has answers of upstream, upstream goes on to answer. The base NAME@0 gets copies of calls, learns, and
    serves once the gate and a canary test have proven it. If the store has none, as with a new app, or with
    `--take-over`, it serves at once.

    The server also watches a canary test. Stop it with Ctrl-C or SIGTERM: running requests are finished, and the apps
    go to another running server of the project if there is one, else back to their provider.
    """
    from art_patch._lib.http_server import listen  # here, because it imports uvicorn

    settings, names = project.settings(), list[str]()
    if advertise is not None:
        advertise, *names = advertised(advertise)
    key_file = str(api_key_file.absolute()) if api_key_file else None
    key, who = read_key(key_file), project.actor("serve")
    policies.check_name(f"{model.name}@0")
    choice = serving.choose(engine, model.device, python=settings.vllm_python, environments=settings.environments)
    # Before anything is downloaded or started for a base that no policy can come from.
    own_template = any(argument.startswith("--chat-template") for argument in extra or ())
    pipeline.check_base(base, has_template=own_template)
    own_key = made_key(settings.directory / ADMIN_KEY_FILE) if key is None else None
    # The port is checked before seconds go into loading the model.
    listen(host, port, key=key, what="the model").close()
    opened = store.open_store(settings.store_url, project=settings.project)
    if (present := _present(opened.ledger)) is not None and present.model != model.name:
        raise ConfigError(
            f"this project serves {present.model!r}; start with --name {present.model}, or another --project"
        )
    tell_once(opened, settings, "serve", as_json=project.as_json)
    if not project.as_json:
        kind = "vLLM" if choice.vllm else "the embedded engine"
        output.stdout().print(f"loading [b]{base}[/] into {kind} ({choice.why}) ...")
        if (left := pipeline.untrained(base)) is not None:
            output.stdout().print(left, style="dim")
    checkpoint = policies.read_base_model(policies.resolve_model_dir(base))
    present = _present(opened.ledger)  # again: the base may have been downloaded for minutes
    if present is not None and present.base_sha256 != checkpoint.sha256:
        raise ConfigError(
            f"{present.name} was trained on {present.base}, which is not {base}; "
            "serve that base, or use another --project"
        )
    if choice.vllm is None:
        served = _embedded(model, vllm, extra, checkpoint, settings)
    else:
        served = _vllm(model, vllm, extra, choice, checkpoint, settings)
    # The base is noted as a policy; it leads only if no other does.
    on_record = opened.read.upstream_answers()
    opened.ledger.add_base(
        served.base_policy, str(checkpoint.directory.absolute()), checkpoint.sha256, who=who,
        upstream_answers=on_record and not take_over,
    )  # fmt: skip
    # What was taken back from the calls once, as by the control group, does not come back by a restart of the server.
    if take_over and (leads := opened.ledger.learner()) is not None and leads.name not in opened.ledger.champions():
        opened.ledger.move(leads.name, "champion", who=who, reason="taken over by hand, without a proof")
    here: list[store.Server] = []
    key_file_for_apps = partial(key_for_apps, key, settings.directory)
    stop, watchers, watching = Event(), list[Thread](), ExitStack()
    watch = metrics.StoreWatch(settings)
    monitor = metrics.ServerMetrics(settings.project, served, watch, stop)

    def on_ready(url: str) -> None:
        # Users write the address with or without /v1.
        address = f"{(advertise or url).rstrip('/').removesuffix('/v1')}/v1"
        me = opened.servers.announce(address, watching.enter_context(owning()), now=time.time())
        here.append(me)
        # Apps read the route from the store, so they send their next call here.
        opened.ledger.set_engine(address, key_file=key_file_for_apps(), who=who)
        own = serving.EngineClient(url, key, admin_key=own_key)
        watching.callback(own.close)
        watchers.extend(watch_beside(settings, own, me, key_file_for_apps, who=who, stop=stop))
        watchers.append(watch.start(stop))
        route = opened.ledger.route()
        serves, kind = route.champion, "vllm" if choice.vllm else "embedded"
        facts: dict[str, Any] = {"base_url": address, "champion": serves, "learner": route.learner}
        event("serve", "ready at %s, champion %s", address, serves or "upstream", event="ready", engine=kind, **facts)
        if not project.answered(facts | {"models": served.policies(), "engine": kind}):
            said = f"[b]{serves}[/] serves" if serves else f"{pipeline.why_none_serves(opened)}; the engine is"
            output.stdout().print(f"{said} at {address}   (Ctrl-C stops it)")
            if serves and not on_record:
                why = "no answer of a provider is on record, so it answers every call that a policy can, untested"
                output.stdout().print(why, style="dim")

    def may_close() -> bool:
        # While another server takes the route, calls still come here; see `ServingUpkeep`.
        return not any(thread.is_alive() for thread in watchers if thread.name == UPKEEP)

    try:
        # Only the champion must load. A policy that is tested or learns and whose files are damaged is left out.
        wanted, champion = promotion.wanted(opened.ledger), opened.ledger.champion()
        must = () if champion is None else (champion.name,)
        serving.run_server(
            served, host=host, port=port, api_key=key, admin_key=own_key, names=names,
            policies=must, spare=[name for name in wanted if name not in must], on_ready=on_ready, stop=stop,
            may_close=may_close,
            serves=partial(_serves, opened.ledger), max_body=max_body_mib << 20, monitor=monitor,
        )  # fmt: skip
    finally:
        stop.set()
        for watcher in watchers:
            watcher.join(_LAST_LOOK_S)
        event("serve", "the server ends", event="end")
        watching.close()
        if here:
            _leave_route(opened, here[0], who)
        opened.close()


def _leave_route(opened: store.Store, me: store.Server, who: str) -> None:
    try:
        # Compare and replace: another server of the project may take the route at this moment.
        if (route := opened.ledger.route()).base_url == me.base_url:
            opened.ledger.set_engine(None, before=route, who=who)
        opened.servers.remove(me)
    except StoreError as error:
        # Apps find nobody at that address, which takes a quarter of a second at most, and then leave it alone.
        words = "the route still names this server, until another one takes it; apps go upstream meanwhile: %s"
        event("serve", words, error, event="route left", level=logging.WARNING)


def advertised(address: str) -> tuple[str, str]:
    """Return the address that apps call, and its host name, which a reverse proxy may pass on in requests.

    An address of IPv4 may stand in brackets, so that a recipe can write both kinds alike: `http://[$(POD_IP)]:8700`.
    """
    plain = re.sub(r"^(https?://)\[([0-9.]+)\]", r"\1\2", address)
    with suppress(ValueError):
        parts = urlsplit(plain)
        # The port must be a number: without brackets, it cannot be told from the rest of an address of IPv6.
        _ = parts.port
        at = parts.netloc.rpartition("@")[2]
        if parts.scheme in ("http", "https") and parts.hostname and (at.count(":") < 2 or at.startswith("[")):
            return plain, parts.hostname
    raise ConfigError(
        f"--advertise {address} is not an address; write it like http://gpu1:8700, or http://[fd00::1]:8700 for IPv6"
    )


def _present(ledger: store.Ledger) -> Policy | None:
    """Return the policy that leads, or the last champion: the project's policies are its base's all the same."""
    names = ledger.champions()
    return ledger.leader() or (ledger.policy(names[-1]) if names else None)


def _serves(ledger: store.Ledger, name: str) -> str | None:
    leader = ledger.leader()
    return leader.name if leader is not None and leader.model == name else None


def _embedded(
    model: ModelOptions, vllm: VllmServer, extra: list[str] | None, checkpoint: policies.BaseModel, settings: Settings
) -> serving.Served:
    # Refused rather than ignored: a user who asks for two GPUs must not get one without a word.
    given = [f"--{option.replace('_', '-')}" for option in VllmServer.__slots__ if getattr(vllm, option)]
    given += ["an argument after `--`"] if extra else []
    if given:
        raise ConfigError(f"{given[0]} is for vLLM, and the embedded engine serves; add --engine vllm, or leave it out")

    import torch

    if model.threads is not None:
        torch.set_num_threads(model.threads)
    limits = {"max_model_len": model.max_model_len, "max_lora_rank": model.max_lora_rank}
    return serving.EmbeddedEngine.from_pretrained(
        checkpoint.directory,
        name=model.name,
        adapters_root=settings.adapters,
        device=model.device,
        dtype=model.dtype,
        limits=serving.EngineLimits(**{key: value for key, value in limits.items() if value is not None}),
    )


def _vllm(
    model: ModelOptions,
    vllm: VllmServer,
    extra: list[str] | None,
    choice: serving.Choice,
    checkpoint: policies.BaseModel,
    settings: Settings,
) -> serving.Served:
    assert choice.vllm is not None
    config: dict[str, Any] = json.loads((checkpoint.directory / "config.json").read_bytes())
    replicas, each, on_cpu = vllm.replicas or 1, vllm.tensor_parallel_size or 1, choice.vllm.device == "cpu"
    # The trainer computes in the same precision, float32 on a CPU and bfloat16 on a GPU. With another one here, the
    # log-probabilities that are recorded would differ from those that training computes.
    dtype = ("float32" if on_cpu else "bfloat16") if model.dtype == "auto" else model.dtype
    options = serving.VllmOptions(
        python=choice.vllm.python,
        base=checkpoint.directory.absolute(),
        name=model.name,
        model_type=str(config.get("model_type", "")),  # the parser of tool calls follows from it
        device=choice.vllm.device,
        dtype=dtype,
        max_model_len=model.max_model_len,
        max_lora_rank=serving.check_rank(model.max_lora_rank or 16),
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        tensor_parallel_size=each,
        threads=model.threads,
        tool_parser=vllm.tool_parser,
        extra=serving.check_extra(extra or ()),
    )
    return serving.VllmEngine(
        options,
        checkpoint,
        adapters_root=settings.adapters,
        home=settings.directory / "vllm",
        replicas=replicas,
        gpus=None if on_cpu else serving.share_out(choice.gpus, replicas, each),
    )
