"""Feedback: signed links that people follow to say how a run of the agent went, and the server behind them.

In: `feedback_url()` in the app, a click in an e-mail or a chat, or an app's own request. Out: a `Score` of source
`user` in the store, as `art_patch.score()` writes it.

Rules. A link names one trajectory and one score, holds until it expires, and is signed with a secret that the link does
not show; whoever has it can give that one score, again and again, and learn nothing: what is answered does not depend
on what the store holds. Reading a link never writes, because mail scanners follow links; only a POST does. A second
answer through the same link replaces the first.

Making a link needs the standard library only; `app` and `server` need Starlette and uvicorn.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.feedback.files import Feedback, feedback_of, read_feedback
    from art_patch.feedback.langfuse_scores import LangfuseScores
    from art_patch.feedback.langsmith_feedback import LangSmithFeedback
    from art_patch.feedback.links import feedback_url
    from art_patch.feedback.server import run_feedback
else:
    __getattr__ = lazily(
        __name__,
        {
            "files": "Feedback feedback_of read_feedback",
            "langfuse_scores": "LangfuseScores",
            "langsmith_feedback": "LangSmithFeedback",
            "links": "feedback_url",
            "server": "run_feedback",
        },
    )
