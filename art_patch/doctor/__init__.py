"""Checks this machine for `art-patch doctor`: what works, what does not, and how to correct it.

`examine` checks this Python environment, the settings, the store and the engine, and returns `Finding`s in this order.
Checks only read. Two checks use a network: the engine is asked for two short answers, and a PostgreSQL store is read.
A check that fails is a finding too, so `examine` raises no error because of what it finds.

`read_shape` and `forecast` tell, from a base's configuration alone, what fits on one card.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.doctor.base_shape import BaseShape, read_shape
    from art_patch.doctor.environment import installed_version, sources
    from art_patch.doctor.examination import examine
    from art_patch.doctor.finding import Finding, Level
    from art_patch.doctor.memory import RANK, UNTRIED, Fit, Forecast, forecast
else:
    __getattr__ = lazily()
