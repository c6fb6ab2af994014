"""Is it worth it? What a stretch of time says of our champion against upstream. Pure: records in, records out.

`compare` says how much better the champion's answers are, with an interval; `money` what was paid and what would have
been; `verdict` makes of both "switch", "do not switch" or "not enough data", with its reasons in words. What is not
known is `None` and named, never zero: an unknown price leaves the money unknown, a run without a score is no bad run.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.insights.analytics import Analytics, analyse
    from art_patch.insights.costs import Prices
    from art_patch.insights.switch_advice import Report, make_report
else:
    __getattr__ = lazily(
        __name__,
        {
            "analytics": "Analytics analyse",
            "costs": "Prices",
            "switch_advice": "Report make_report",
        },
    )
