"""The demo: an unchanged agent improves from its own recorded calls, with a tiny model and a rule as the judge."""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.demo.run import CYCLES, run_demo
else:
    __getattr__ = lazily()
