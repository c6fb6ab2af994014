"""Feedback: stores what users think of an answer as a `Score`, as `art_patch.score()` does.

`links` makes signed links with which people score a run, `app` is the server that answers them, and checks and keeps
what they say, and `other_tools` imports scores that people gave in Langfuse and LangSmith. A link names one trajectory
and one score until it expires. Anyone who has it can give that score; a later answer replaces the earlier one, and no
response shows anything of the store.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.feedback.app import LONGEST_COMMENT, comment_of, keep_opinion, run_feedback, value_of
    from art_patch.feedback.links import feedback_url
    from art_patch.feedback.other_tools import (
        LangfuseScores, LangSmithFeedback, feedback_of, read_feedback, write_feedback,
    )
else:
    __getattr__ = lazily()
