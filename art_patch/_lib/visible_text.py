"""Makes escape sequences, which could hide text or type for the user, and changes of the writing direction visible."""

import re

# C0 without tab and newline, DEL, C1, marks and overrides of direction, line separators, halves of surrogate pairs.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: object) -> str:
    r"""Return the text with each character that could control a terminal replaced by its escape, such as `\x1b`."""
    # A Windows line end is harmless; a carriage return alone could overwrite the line.
    return _UNSAFE.sub(_escape, str(text).replace("\r\n", "\n"))


def one_line(text: object) -> str:
    """Return the text as `visible` does, with line breaks and tabs replaced, so that it fits on one line."""
    return " ".join(visible(text).split())


def sentences(reason: object) -> list[str]:
    """Return the parts of a reason, a line each, the verdict first: it joins them with `; ` outside of brackets."""
    parts, depth = [""], 0
    for part in one_line(reason).split("; "):
        parts[-1] = f"{parts[-1]}; {part}" if depth > 0 else part
        depth += part.count("(") - part.count(")")
        if depth <= 0:
            parts.append("")
            depth = 0
    return [part for part in parts if part]


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
