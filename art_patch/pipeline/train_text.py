"""The base's own words: its tokenizer and chat template, and whether they lead to what was recorded.

Nothing here changes what is trained, and nothing fails: a base that has none of it is trained on recorded ids all the
same. Counts stay with the policy. What was decoded is somebody's words, so only the cycle's report has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from art_patch.errors import ConfigError
from art_patch.pipeline.cycle_run import Run
from art_patch.training import Family, Renderer, RoundTrips, check_round_trips, family_of
from art_patch.types import Trajectory

_CHECKED = 32  # calls: two renderings and an encoding each, some milliseconds for a short one, 0.1 s for a long one


@dataclass(frozen=True, slots=True)
class BaseText:
    """How a base's text is made.

    Attributes:
        tokenizer: of transformers; `None` if there is none with a chat template.
        family: of the base.
        why_not: there is no tokenizer.
        found: what the template makes of recorded calls.
    """

    tokenizer: Any
    family: Family
    why_not: str | None = None
    found: RoundTrips | None = None

    def renderer(self) -> Renderer:
        """Return what renders as the engine did that served.

        Raises:
            ConfigError: there is nothing to render with.
        """
        if self.tokenizer is None or self.found is None:
            raise ConfigError(
                f"what upstream or people said cannot be learned: {self.why_not}; put the tokenizer beside the base's "
                "weights, or train without imitate_from and prefer_from"
            )
        return Renderer(self.tokenizer, self.family, self.found.engine)


def base_text(base: str, runs: Sequence[Trajectory]) -> BaseText:
    """Return how a base's text is made, checked against recorded runs."""
    from transformers import AutoConfig, AutoTokenizer  # the update needs transformers anyhow

    family = family_of(AutoConfig.from_pretrained(base).model_type)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(base)
    except Exception as error:  # OSError, ValueError, ImportError, and tokenizers raises bare ones
        return BaseText(None, family, f"the base has no tokenizer that can be read ({type(error).__name__})")
    if not tokenizer.chat_template:
        return BaseText(None, family, "the base has no chat template")
    return BaseText(tokenizer, family, found=check_round_trips(runs, tokenizer, family=family, limit=_CHECKED))


def round_trip_metrics(run: Run, text: BaseText) -> dict[str, Any]:
    """Return what was found, in numbers; the first difference in words is in the report, as `round_trips`."""
    if text.found is None:
        return {"not_checked": text.why_not}
    if text.found.differences:
        run.metrics["round_trips"] = {"first": replace(text.found, examples=text.found.examples[:1]).as_text()}
    return text.found.metrics()
