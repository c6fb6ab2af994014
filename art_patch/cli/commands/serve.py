"""`art-patch serve`: the engine, and the route that tells the apps where it is."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import typer

from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

if TYPE_CHECKING:
    from art_patch.policies import BaseModel
    from art_patch.serving import Choice, Served
    from art_patch.settings import Settings
    from art_patch.store import Ledger

_VLLM = "vLLM"

_LAST_LOOK_S = 10.0
"""How long the end waits for a look at the challenger that is under way."""


class _Asked(NamedTuple):
    """What the command line says about the engine; `None` is not given."""

    name: str
    device: str
    dtype: str
    threads: int | None
    max_model_len: int | None
    max_lora_rank: int | None
    replicas: int | None
    tensor_parallel_size: int | None
    gpu_memory_utilization: float | None
    tool_parser: str | None
    extra: list[str] | None


def serve(
    base: Annotated[str, typer.Option("--base", help="Model directory or Hugging Face id.")],
    extra: Annotated[
        list[str] | None,
        typer.Argument(help="More arguments for vLLM, after `--`.", show_default=False, metavar="VLLM_ARGUMENTS"),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Policies are served as NAME@STEP.")] = "agent",
    engine: Annotated[
        str, typer.Option("--engine", help="vllm, embedded, or auto: vLLM on a GPU, else embedded.")
    ] = "auto",
    host: Annotated[str, typer.Option("--host", help="Beyond loopback a key is required.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 8700,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with the key that callers must send; mode 600.")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option("--advertise", help="Address that apps on other machines call, such as http://gpu1:8700."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", help="CPU threads; all cores unless given.", min=1)
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Tokens of prompt and answer; the model's own.", min=16)
    ] = None,
    max_lora_rank: Annotated[
        int | None, typer.Option("--max-lora-rank", help="Largest rank that may serve.  [default: 16; embedded: 64]")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", help="vLLM processes.", min=1, rich_help_panel=_VLLM)
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", help="GPUs of a replica.", min=1, rich_help_panel=_VLLM)
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory-utilization", help="Share of a GPU's memory.", min=0.05, max=1, rich_help_panel=_VLLM
        ),
    ] = None,
    tool_parser: Annotated[
        str | None,
        typer.Option("--tool-parser", help="vLLM's --tool-call-parser; goes by the model.", rich_help_panel=_VLLM),
    ] = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the base model and its policies; apps of the project follow at once. A canary is looked after.

    The base becomes the champion NAME@0 if there is none yet. Stop it with Ctrl-C or SIGTERM: running requests are
    finished, and the apps go to another server of the project that runs, else back to their provider.
    """
    from art_patch._lib.http_server import listen
    from art_patch._lib.key_files import ADMIN_KEY_FILE, key_for_apps, made_key, read_key
    from art_patch.cli.commands.watch import watch_beside
    from art_patch.cli.views.output import answer, stdout
    from art_patch.policies import check_name, read_base_model, resolve_model_dir
    from art_patch.promotion import wanted
    from art_patch.serving import EngineClient, choose, run_server
    from art_patch.settings import load_settings
    from art_patch.store import open_store

    settings = load_settings(project=project, home=home, store=store)
    names = _names(advertise)
    key_file = str(api_key_file.absolute()) if api_key_file else None
    key, me = read_key(key_file), who_am_i(who, "serve")
    check_name(f"{name}@0")
    choice = choose(engine, device, python=settings.vllm_python, environments=settings.environments)
    own_key = made_key(settings.directory / ADMIN_KEY_FILE) if key is None else None
    # The port is checked before seconds go into loading the model.
    listen(host, port, key=key, what="the model").close()
    opened = open_store(settings.store_url, project=settings.project)
    _check_model(opened.ledger, name)
    asked = _Asked(
        name, device, dtype, threads, max_model_len, max_lora_rank, replicas, tensor_parallel_size,
        gpu_memory_utilization, tool_parser, extra,
    )  # fmt: skip
    if not as_json:
        kind = "vLLM" if choice.vllm else "the embedded engine"
        stdout().print(f"loading [b]{base}[/] into {kind} ({choice.why}) ...")
    checkpoint = read_base_model(resolve_model_dir(base))
    _check_base(opened.ledger, checkpoint, base)
    served = _make(asked, choice, checkpoint, settings)
    opened.ledger.add_base(served.base_policy, str(checkpoint.directory.absolute()), checkpoint.sha256, who=me)
    here: list[str] = []
    key_file_for_apps = partial(key_for_apps, key, settings.directory)
    stop, watchers, watching = Event(), list[Thread](), ExitStack()

    def on_ready(url: str) -> None:
        here.append(f"{(advertise or url).rstrip('/').removesuffix('/v1')}/v1")
        opened.ledger.set_engine(here[0], key_file=key_file_for_apps(), who=me)
        own = EngineClient(url, key, admin_key=own_key)
        watching.callback(own.close)
        watchers.extend(watch_beside(settings, own, here[0], key_file_for_apps, who=me, stop=stop))
        champion = opened.ledger.champion()
        serves = champion.name if champion else None
        if as_json:
            kind = "vllm" if choice.vllm else "embedded"
            answer({"base_url": here[0], "champion": serves, "models": served.policies(), "engine": kind})
        else:
            stdout().print(f"[b]{serves}[/] serves at {here[0]}   (Ctrl-C stops it)")

    try:
        champion, *spare = wanted(opened.ledger)  # no other policy keeps this one from serving
        run_server(
            served, host=host, port=port, api_key=key, admin_key=own_key, names=names,
            policies=(champion,), spare=spare, on_ready=on_ready, serves=partial(_serves, opened.ledger),
        )  # fmt: skip
    finally:
        stop.set()
        for watcher in watchers:
            watcher.join(_LAST_LOOK_S)
        watching.close()
        if here and (route := opened.ledger.route()).base_url == here[0]:
            opened.ledger.replace_engine(route, None, who=me)  # unless another server takes it this moment
        opened.close()


def _names(advertised: str | None) -> list[str]:
    """Return the name in the advertised address: a reverse proxy on this machine may pass it on."""
    from art_patch.errors import ConfigError

    if advertised is None:
        return []
    try:
        address = urlsplit(advertised)
    except ValueError:
        address = urlsplit("")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"--advertise {advertised} is not an address; write it like http://gpu1:8700")
    return [address.hostname]


def _serves(ledger: Ledger, name: str) -> str | None:
    champion = ledger.champion()
    return champion.name if champion is not None and champion.model == name else None


def _check_model(ledger: Ledger, name: str) -> None:
    from art_patch.errors import ConfigError

    champion = ledger.champion()
    if champion is not None and champion.model != name:
        raise ConfigError(
            f"this project serves {champion.model!r}; start with --name {champion.model}, or another --project"
        )


def _check_base(ledger: Ledger, checkpoint: BaseModel, base: str) -> None:
    from art_patch.errors import ConfigError

    champion = ledger.champion()
    if champion is not None and champion.base_sha256 != checkpoint.sha256:
        raise ConfigError(
            f"{champion.name} was trained on {champion.base}, which is not {base}; "
            "serve that base, or use another --project"
        )


def _make(asked: _Asked, choice: Choice, checkpoint: BaseModel, settings: Settings) -> Served:
    return _embedded(asked, checkpoint, settings) if choice.vllm is None else _vllm(asked, choice, checkpoint, settings)


def _embedded(asked: _Asked, checkpoint: BaseModel, settings: Settings) -> Served:
    from art_patch.errors import ConfigError

    for option in ("replicas", "tensor_parallel_size", "gpu_memory_utilization", "tool_parser", "extra"):
        if getattr(asked, option):
            shown = "an argument after `--`" if option == "extra" else f"--{option.replace('_', '-')}"
            raise ConfigError(
                f"{shown} is for vLLM, and the embedded engine serves; add --engine vllm, or leave it out"
            )

    import torch

    from art_patch.serving import EmbeddedEngine, EngineLimits

    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    limits = {"max_model_len": asked.max_model_len, "max_lora_rank": asked.max_lora_rank}
    return EmbeddedEngine.from_pretrained(
        checkpoint.directory,
        name=asked.name,
        adapters_root=settings.adapters,
        device=asked.device,
        dtype=asked.dtype,
        limits=EngineLimits(**{key: value for key, value in limits.items() if value is not None}),
    )


def _vllm(asked: _Asked, choice: Choice, checkpoint: BaseModel, settings: Settings) -> Served:
    from art_patch.serving import VllmEngine, VllmOptions, check_extra, check_rank, share_out

    assert choice.vllm is not None
    config: dict[str, Any] = json.loads((checkpoint.directory / "config.json").read_bytes())
    replicas, each, on_cpu = asked.replicas or 1, asked.tensor_parallel_size or 1, choice.vllm.device == "cpu"
    # The trainer computes in the same: float32 on a CPU, bfloat16 on a GPU.
    dtype = ("float32" if on_cpu else "bfloat16") if asked.dtype == "auto" else asked.dtype
    options = VllmOptions(
        python=choice.vllm.python,
        base=checkpoint.directory.absolute(),
        name=asked.name,
        model_type=str(config.get("model_type", "")),
        device=choice.vllm.device,
        dtype=dtype,
        max_model_len=asked.max_model_len,
        max_lora_rank=check_rank(asked.max_lora_rank or 16),
        gpu_memory_utilization=asked.gpu_memory_utilization,
        tensor_parallel_size=each,
        threads=asked.threads,
        tool_parser=asked.tool_parser,
        extra=check_extra(asked.extra or ()),
    )
    return VllmEngine(
        options,
        checkpoint,
        adapters_root=settings.adapters,
        home=settings.directory / "vllm",
        replicas=replicas,
        gpus=None if on_cpu else share_out(choice.gpus, replicas, each),
    )
