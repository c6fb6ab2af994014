"""`art-patch report`: is it worth it?"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated

import typer

from art_patch.cli.options.opening import require_project
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption

if TYPE_CHECKING:
    from art_patch.insights import Prices

_DAY_S = 86_400.0


def report(
    days: Annotated[float, typer.Option("--days", min=0.01, help="How far back.")] = 7.0,
    upstream_price: Annotated[
        tuple[float, float] | None,
        typer.Option(
            metavar="IN OUT",
            envvar="ART_PATCH_UPSTREAM_PRICE",
            help="Dollars that upstream takes for a million prompt tokens, and for a million of its answers.",
            show_default=False,
        ),
    ] = None,
    litellm_prices: Annotated[
        bool, typer.Option("--litellm-prices", help="Prices from the list that litellm brings, by model instead.")
    ] = False,
    gpu_usd_per_hour: Annotated[
        float | None,
        typer.Option(
            min=0.0, envvar="ART_PATCH_GPU_USD_PER_HOUR", help="What the GPUs of the engine cost.", show_default=False
        ),
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0.0, help="How much lower its mean score may be and still count as good.")
    ] = 0.05,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the champion with upstream: quality, failures, latency, money. It can say "do not switch".

    Quality is what users, code and the judge said of answers; money is what upstream would have taken for our answers,
    minus GPU, judge and updates. What is not known is named and never taken for zero.
    Exit codes: 0 whatever the verdict; 2 an option says something impossible; 8 there is no store.
    """
    from art_patch.cli.views.output import answer, stdout
    from art_patch.cli.views.report_view import as_facts, as_markdown, show
    from art_patch.errors import ConfigError
    from art_patch.insights import make_report
    from art_patch.settings import load_settings
    from art_patch.store import open_database, usage

    if markdown and as_json:
        raise ConfigError("--markdown and --json are two forms; choose one")
    prices = _prices(upstream_price, litellm_prices)
    settings = load_settings(project=project, home=home, store=store)
    until = time.time()
    require_project(settings)
    database = open_database(settings.store_url, create=False, project=settings.project)
    try:
        used = usage(database, since=until - days * _DAY_S, until=until)
    finally:
        database.close()
    made = make_report(used, prices, gpu_usd_per_hour=gpu_usd_per_hour, margin=margin)
    if as_json:
        answer({"project": settings.project, "days": days, **as_facts(made)})
    elif markdown:
        typer.echo(as_markdown(made, settings.project), nl=False)
    else:
        show(made, settings.project, stdout())


def _prices(given: tuple[float, float] | None, litellm_prices: bool) -> Prices:
    """Return where prices come from; without any, none is known.

    Raises:
        ConfigError: they are no prices, or there are two sources.
    """
    from art_patch.errors import ConfigError

    if given is not None and litellm_prices:
        raise ConfigError("--upstream-price and --litellm-prices are two sources; choose one")
    if given is not None and not all(math.isfinite(price) and price >= 0 for price in given):
        raise ConfigError(f"{given[0]:g} {given[1]:g} are no prices; give dollars a million tokens, such as 0.25 2")
    if not litellm_prices:
        return lambda _: given
    from art_patch.rewards import price_usd

    def from_litellm(model: str) -> tuple[float, float] | None:
        # Of a thousand tokens: some providers ask more a token of very long prompts.
        prompt, completion = price_usd(model, 1_000, 0), price_usd(model, 0, 1_000)
        return None if prompt is None or completion is None else (prompt * 1_000, completion * 1_000)

    return from_litellm
