"""Is it worth it? Reports on the traffic of some days. Pure: records in, records out.

`switch_advice` compares the champion's answers with upstream's and says "switch", "do not switch" or "not enough data",
with reasons. `costs` says what was paid and saved. `analytics` has statistics of the agent's runs. A value that is not
known is `None` and named in a note, never zero.
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
