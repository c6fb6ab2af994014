"""What a person may say on the page for reviews: which of two runs is better, thumbs, and right answers.

They are stored as the answers to feedback links are, as people's scores and corrections. Each has an id made of what it
is about, so that a second answer replaces the first. The ledger has no entry of them; their comment names the person.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from art_patch import feedback
from art_patch.context import assistant_message
from art_patch.errors import ConfigError, NotFound
from art_patch.types import Correction, Score
from art_patch.web.acting import Acting, Done, message_of
from art_patch.web.review import correction_id, thumbs_id
from art_patch.web.review_queue import PREFERENCE, pair_of, score_id

_CHOICES = {
    "left": ((1.0, "better than its sibling"), (0.0, "worse than its sibling")),
    "right": ((0.0, "worse than its sibling"), (1.0, "better than its sibling")),
    "tie": ((0.5, "as good as its sibling"), (0.5, "as good as its sibling")),
}


def prefer(acting: Acting) -> Done:
    """Keep which of a group's two runs is better: 1 for it and 0 for the other, or 0.5 for both."""
    form, group = acting.form, acting.key("group")
    runs, choice = [acting.key("left"), acting.key("right")], form.get("choice", "")
    pair = pair_of(acting.project.store, group)
    if pair is None or [pair.left, pair.right] != runs:
        raise NotFound("these two runs are not the pair of this group any more; load the page again")
    if choice not in _CHOICES:
        raise ConfigError("say which of the two is better: left, right or tie")
    for run, (value, about) in zip(runs, _CHOICES[choice], strict=True):
        comment = _comment(acting, about)
        acting.project.keep_opinion(
            Score(score_id(group, run), run, PREFERENCE, value, "user", acting.now, comment=comment)
        )
    then = {"kind": form.get("kind", ""), "after": form.get("after", ""), "answered": group}
    return Done("Noted.", then=f"review?{urlencode({key: value for key, value in then.items() if value})}")


def thumb(acting: Acting) -> str:
    """Keep whether a run is good."""
    value = {"up": 1.0, "down": 0.0}.get(acting.form.get("thumb", ""))
    if value is None:
        raise ConfigError("say whether the run is good: up or down")
    run = acting.key("run")
    acting.project.keep_opinion(
        Score(thumbs_id(run), run, "thumbs", value, "user", acting.now, comment=_comment(acting))
    )
    return f"Noted: thumbs {'up' if value else 'down'}."


def correct(acting: Acting) -> str:
    """Keep the answer that would have been right."""
    run, answer = acting.key("run"), acting.form.get("answer", "").replace("\r\n", "\n")
    message = assistant_message(_message(answer))
    acting.project.keep_opinion(
        Correction(correction_id(run), run, acting.now, "user", message, comment=_comment(acting))
    )
    return "Noted: the next update may learn this answer."


def _message(answer: str) -> Any:
    """Return a whole assistant message if the person wrote one as JSON, for an answer with tool calls; else a text."""
    try:
        message = message_of(answer)
    except ConfigError:
        return answer
    return message if isinstance(message, dict) and message.get("role") == "assistant" else answer


def _comment(acting: Acting, about: str = "") -> str:
    """Return the person's name, what was said, and the person's own words."""
    own = feedback.comment_of(acting.form.get("comment"))
    return ": ".join(part for part in (acting.who("review"), about, own) if part)
