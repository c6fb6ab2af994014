"""Feedback: signed links with which people score a run of the agent, the server behind them, and other tools' scores.

In: `feedback_url()` in the app, a click in an e-mail or a chat, or an app's own request. Out: a `Score` of source
`user` in the store, as `art_patch.score()` writes it.

Rules. A link names one trajectory and one score and is valid until it expires. It is signed with a secret that the link
does not show. A person with the link can give that one score, again and again, and learns nothing about the store: the
server's answer does not depend on it. Only a POST writes, because mail scanners follow links. A second answer through
the same link replaces the first.

Making a link needs the standard library only; `app` needs Starlette and uvicorn.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.feedback.app import run_feedback
    from art_patch.feedback.files import Feedback, LangfuseScores, LangSmithFeedback, feedback_of, read_feedback
    from art_patch.feedback.links import feedback_url
else:
    __getattr__ = lazily(
        __name__,
        {
            "app": "run_feedback",
            "files": "Feedback LangfuseScores LangSmithFeedback feedback_of read_feedback",
            "links": "feedback_url",
        },
    )
