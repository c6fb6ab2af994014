"""`art-patch serve`: the engine, and the route that tells the apps where it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_patch.cli.options import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

if TYPE_CHECKING:
    from art_patch.serving.embedded import EmbeddedEngine
    from art_patch.store.ledger import Ledger


def serve(
    base: Annotated[str, typer.Option("--base", help="Model directory or Hugging Face id.")],
    name: Annotated[str, typer.Option("--name", help="Policies are served as NAME@STEP.")] = "agent",
    host: Annotated[str, typer.Option("--host", help="Beyond loopback a key is required.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 8700,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with the key that callers must send; mode 600.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", help="CPU threads; all cores unless given.", min=1)
    ] = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the base model and its policies; apps of the project follow at once.

    The base becomes the champion NAME@0 if there is none yet. Stop it with Ctrl-C or SIGTERM: running requests are
    finished, and the apps go back to their provider.
    """
    from art_patch.cli.output import answer, stdout
    from art_patch.serving.adapters import check_name
    from art_patch.serving.keys import read_key
    from art_patch.settings import load_settings
    from art_patch.store import open_store

    settings = load_settings(project=project, home=home, store=store)
    key_file = str(api_key_file.absolute()) if api_key_file else None
    key, me = read_key(key_file), who_am_i(who, "serve")
    check_name(f"{name}@0")
    opened = open_store(settings.store_url)
    _check_model(opened.ledger, name)

    from art_patch.listening import listen
    from art_patch.serving.server import run_server

    listen(
        host, port, key=key, what="the model"
    ).close()  # the port is checked before seconds go into loading the model
    if not as_json:
        stdout().print(f"loading [b]{base}[/] ...")
    engine = _load(opened.ledger, settings.adapters, base, name, device=device, dtype=dtype, threads=threads, who=me)
    here: list[str] = []

    def on_ready(url: str) -> None:
        here.append(f"{url}/v1")
        opened.ledger.set_engine(here[0], key_file=key_file, who=me)
        champion = opened.ledger.champion()
        serves = champion.name if champion else None
        if as_json:
            answer({"base_url": here[0], "champion": serves, "models": engine.policies()})
        else:
            stdout().print(f"[b]{serves}[/] serves at {here[0]}   (Ctrl-C stops it)")

    try:
        run_server(engine, host=host, port=port, api_key=key, on_ready=on_ready)
    finally:
        if here and opened.ledger.route().base_url == here[0]:  # another server may have taken over
            opened.ledger.set_engine(None, who=me)
        opened.close()


def _check_model(ledger: Ledger, name: str) -> None:
    from art_patch.errors import ConfigError

    champion = ledger.champion()
    if champion is not None and champion.model != name:
        raise ConfigError(
            f"this project serves {champion.model!r}; start with --name {champion.model}, or another --project"
        )


def _load(
    ledger: Ledger,
    adapters: Path,
    base: str,
    name: str,
    *,
    device: str,
    dtype: str,
    threads: int | None,
    who: str,
) -> EmbeddedEngine:
    """Return an engine that holds the base and every policy that may be asked for."""
    import torch

    from art_patch.errors import ConfigError
    from art_patch.promotion.promote import wanted
    from art_patch.serving.embedded import EmbeddedEngine

    if threads is not None:
        torch.set_num_threads(threads)
    engine = EmbeddedEngine.from_pretrained(base, name=name, adapters_root=adapters, device=device, dtype=dtype)
    try:
        champion = ledger.champion()
        if champion is not None and champion.base_sha256 != engine.base.sha256:
            raise ConfigError(
                f"{champion.name} was trained on {champion.base}, which is not {base}; "
                "serve that base, or use another --project"
            )
        ledger.add_base(engine.base_policy, str(engine.base.directory.absolute()), engine.base.sha256, who=who)
        for policy in wanted(ledger):
            if policy != engine.base_policy:
                asyncio.run(engine.load(policy))
    except BaseException:
        engine.close()
        raise
    return engine
