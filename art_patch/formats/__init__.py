"""Writes trajectories to files that other tools read, and reads such files.

`rows` makes rows of training files, `complete` keeps a trajectory as JSON without loss, `foreign` reads rows of other
tools. `files` writes rows to disk and reads them; all other modules are pure.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.formats.complete import Bundle, encode, indexed
    from art_patch.formats.files import COLUMNS, STREAM, reading, writing
    from art_patch.formats.foreign import ImportFormat, bundles_of, kind_of
    from art_patch.formats.rows import (
        Unusable, chat_row, correction_row, corrected, grpo_row, preference_rows, right_and_wrong, sft_prompt_rows,
        sft_row,
    )
else:
    __getattr__ = lazily()
