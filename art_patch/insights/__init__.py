"""Reports on the traffic of a period: is it worth switching from upstream to the champion, and do runs succeed? Pure.

`switch_advice` compares the champion's answers with upstream's, and computes costs and savings. `analytics` computes
statistics of the agent's runs. A value that is not known is `None`, never zero.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.insights.analytics import Analytics, analyse
    from art_patch.insights.switch_advice import Prices, Report, make_report
else:
    __getattr__ = lazily()
