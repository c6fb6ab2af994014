"""Makes `from art_patch.utils import iterate_dataset` work, as OpenPipe ART has these functions in `art.utils`."""

from art_patch.rollouts import iterate_dataset, limit_concurrency, retry

__all__ = ["iterate_dataset", "limit_concurrency", "retry"]
