"""`art-patch proxy`: an OpenAI-compatible address for what no patch of the SDK can see."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from art_patch.cli.options.opening import refuse_foreign
from art_patch.cli.options.shared import (
    HomeOption,
    JsonOption,
    MatchOption,
    ModeOption,
    ProjectOption,
    RedactOption,
    SampleRateOption,
    StoreOption,
)


def proxy(
    upstream: Annotated[
        str, typer.Option("--upstream", envvar="OPENAI_BASE_URL", help="Your provider.")
    ] = "https://api.openai.com/v1",
    host: Annotated[str, typer.Option("--host", help="Beyond loopback a key is required.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 8701,
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", help="File with the key that callers send as x-art-key; mode 600."),
    ] = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    mode: ModeOption = None,
    match: MatchOption = None,
    sample_rate: SampleRateOption = None,
    redact: RedactOption = None,
    as_json: JsonOption = False,
) -> None:
    """Route and record what arrives at an address, for other languages and other HTTP clients.

    Point a client's base URL at it, with the provider's own key, which goes nowhere else.

    Headers that say more: x-art-trajectory-id, x-art-scenario, x-art-session-id,
    x-art-user-id, x-art-group, traceparent.
    """
    from art_patch._lib.key_files import read_key
    from art_patch.errors import ConfigError
    from art_patch.settings import load_settings

    try:
        from art_patch.proxy import run_proxy
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("art_patch"):
            raise
        raise ConfigError(f'the proxy needs {error.name}; run: pip install "art-patch[proxy]"') from None

    given: dict[str, Any] = {
        "project": project,
        "home": home,
        "store": store,
        "mode": mode,
        "match": match,
        "sample_rate": sample_rate,
        "redact": redact,
    }
    settings = load_settings(**given)
    refuse_foreign(settings)
    key = read_key(None if key_file is None else str(key_file))

    def on_ready(here: str) -> None:
        _say(here, upstream, settings.project, settings.store_url, as_json)

    run_proxy(upstream, host=host, port=port, key=key, on_ready=on_ready, **given)


def _say(here: str, upstream: str, project: str, store: str, as_json: bool) -> None:
    from art_patch.cli.views.output import answer, stdout
    from art_patch.patching import status
    from art_patch.store import without_password

    now = status()
    if as_json:
        answer(
            {"base_url": here, "upstream": upstream, "project": project, "store": without_password(store)}
            | {"mode": now.mode, "champion": now.champion}
        )
        return
    console = stdout()
    who = f"champion [b]{now.champion}[/]" if now.champion else "no champion yet: calls go upstream"
    console.print(f"[b]{here}[/] stands in for {upstream}   (Ctrl-C stops it)")
    console.print(f"[dim]project {project}, mode {now.mode}, {who}[/]")
    for sentence in now.degraded:
        console.print(f"[yellow]{sentence}[/]")
