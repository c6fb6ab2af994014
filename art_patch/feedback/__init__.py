"""Feedback: stores what users think of an answer as a `Score`, as `art_patch.score()` does.

`links` makes signed links, for an e-mail or a chat, with which people score a run. `app` is the server that answers
these links. `other_tools` imports scores that people gave in Langfuse and LangSmith.

A link names one trajectory and one score, and is valid until it expires. Anyone who has the link can give that one
score, any number of times; a later answer replaces the earlier one. The server's responses show nothing of the store.

Making a link needs the standard library only; the server needs Starlette and uvicorn.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.feedback.app import run_feedback
    from art_patch.feedback.links import feedback_url
    from art_patch.feedback.other_tools import (
        LangfuseScores, LangSmithFeedback, feedback_of, read_feedback, write_feedback,
    )
else:
    __getattr__ = lazily()
