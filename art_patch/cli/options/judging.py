"""The options of every command that asks the judge, and the judge they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from art_patch.rewards import Judge
    from art_patch.settings import Settings

JudgeOption = Annotated[
    str | None, typer.Option("--judge", envvar="ART_PATCH_JUDGE", help="litellm name of the judge model.")
]
JudgeBaseUrlOption = Annotated[
    str | None, typer.Option("--judge-base-url", envvar="ART_PATCH_JUDGE_BASE_URL", help="Where the judge answers.")
]
RubricOption = Annotated[
    str | None, typer.Option("--rubric", envvar="ART_PATCH_RUBRIC", help="File or text the judge goes by.")
]
MaxUsdOption = Annotated[
    float | None,
    typer.Option(
        "--max-usd",
        "--budget-usd",
        envvar="ART_PATCH_MAX_USD",
        help="Stop asking the judge before it costs more; --budget-usd is the same.",
    ),
]
MaxCallsOption = Annotated[
    int | None,
    typer.Option("--max-calls", envvar="ART_PATCH_MAX_CALLS", help="Ask the judge no more often than this."),
]
CheckOption = Annotated[
    list[str] | None,
    typer.Option("--check", help="A function that scores runs, module:function; may be repeated.", show_default=False),
]


def make_judge(
    settings: Settings, *, max_usd: float | None, max_calls: int | None, max_prompt_tokens: int | None = None
) -> Judge:
    """Return the judge that settings and options mean.

    Raises:
        JudgeError: none is named.
        ConfigError: a limit or the rubric is of no use.
    """
    from art_patch.rewards import Budget, Judge, load_rubric

    return Judge(
        settings.judge,
        base_url=settings.judge_base_url,
        api_key=settings.judge_api_key,
        rubric=load_rubric(settings.rubric),
        budget=Budget(max_usd, max_calls),
        max_prompt_tokens=max_prompt_tokens,
    )
