"""Feedback: signed links that people follow to say how a run of the agent went, and the server behind them.

In: `feedback_url()` in the app, a click in an e-mail or a chat, or an app's own request. Out: a `Score` of source
`user` in the store, as `art_patch.score()` writes it.

Rules. A link names one trajectory and one score, holds until it expires, and is signed with a secret that the link does
not show; whoever has it can give that one score, again and again, and learn nothing: what is answered does not depend
on what the store holds. Reading a link never writes, because mail scanners follow links; only a POST does. A second
answer through the same link replaces the first.

Making a link needs the standard library only; `app` and `server` need Starlette and uvicorn.
"""

from __future__ import annotations

from art_patch.feedback.links import feedback_url

__all__ = ["feedback_url"]
