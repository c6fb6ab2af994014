"""The page behind a link: two buttons and a text, plain HTML. No script, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from html import escape

LONGEST_COMMENT = 2_000
"""Characters."""

_STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; margin: 0; min-height: 100vh; display: grid; place-items: center;
       background: light-dark(#f4f4f2, #1b1b1d); color: light-dark(#222, #e8e8e6); }
main { box-sizing: border-box; width: min(26rem, 100vw); padding: 1.75rem; }
h1 { font-size: 1.25rem; margin: 0 0 1rem; }
p { margin: 0 0 1rem; }
.answers { display: grid; grid-template-columns: 1fr 1fr; gap: .75rem; margin: 1rem 0 0; }
button { font: inherit; padding: .9rem .5rem; border-radius: .6rem; cursor: pointer; color: inherit;
         border: 1px solid light-dark(#bbb, #555); background: light-dark(#fff, #29292c); }
button:hover, button:focus-visible, button.chosen { border-color: #2f6fdf; outline: 2px solid #2f6fdf; }
button span { display: block; font-size: 1.9rem; line-height: 1.3; }
label { display: block; margin: 0 0 .35rem; }
textarea { box-sizing: border-box; width: 100%; font: inherit; padding: .6rem; border-radius: .6rem; color: inherit;
           border: 1px solid light-dark(#bbb, #555); background: light-dark(#fff, #29292c); }
small { color: light-dark(#666, #aaa); }
"""

_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

HEADERS = {
    # The address is the right to answer, so it goes nowhere: not to other sites, not into caches or search engines.
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "x-robots-tag": "noindex, nofollow",
    "x-content-type-options": "nosniff",
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'self'; "
        "frame-ancestors 'none'; base-uri 'none'"
    ),
}

_ANSWERS = (("1", "\N{THUMBS UP SIGN}", "It helped"), ("0", "\N{THUMBS DOWN SIGN}", "It did not help"))


def form(*, chosen: str = "", comment: str = "", thanks: bool = False) -> str:
    """Return the page that asks; with `thanks`, the one that follows an answer and lets it be changed."""
    if thanks:
        head, note = "Thank you", "<p>Your answer was noted. You can still change it here.</p>"
    else:
        confirm = "<p>Press the button to confirm your answer.</p>"
        head, note = "Did this help?", confirm if chosen in ("0", "1") else ""
    buttons = "".join(
        f'<button name="value" value="{value}"{_mark(value == chosen)}>'
        f'<span aria-hidden="true">{sign}</span>{words}</button>'
        for value, sign, words in _ANSWERS
    )
    return _page(
        head,
        f'{note}<form method="post"><label for="comment">What should we know? <small>(if you like)</small></label>'
        f'<textarea id="comment" name="comment" rows="3" maxlength="{LONGEST_COMMENT}">\n{escape(comment)}</textarea>'
        f'<div class="answers">{buttons}</div></form>',
    )


def sentence(text: str) -> str:
    """Return a page that says one thing."""
    return _page("Feedback", f"<p>{escape(text)}</p>")


def _mark(chosen: bool) -> str:
    return ' class="chosen" autofocus' if chosen else ""


def _page(head: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="robots" content="noindex">'
        f"<title>{escape(head)}</title><style>{_STYLE}</style></head>"
        f"<body><main><h1>{escape(head)}</h1>{body}</main></body></html>"
    )
