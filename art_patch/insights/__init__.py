"""Reports on the traffic of a period; a value that is not known is `None`, never zero. Pure.

`switch_advice`: is it worth switching from upstream to the champion, and what does it save? `analytics`: do runs
succeed?
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.insights.analytics import Analytics, analyse
    from art_patch.insights.switch_advice import Prices, Report, make_report
else:
    __getattr__ = lazily()
