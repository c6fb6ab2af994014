"""The header `X-Art-Patch-Learn` of an app's call, by which it says whether its run may be learned from.

It is for us alone: the SDK sends it to nobody, whether it is a header of the call or of its client. Any value but yes,
true, 1 or on forbids, and so does a header that cannot be read, so a misspelt word lets nobody be learned from. If the
client's header and the call's differ, the one that forbids counts.
"""

from collections.abc import Mapping
from typing import Any, cast

from art_patch._lib.faults import faults
from art_patch.patching.rewriting.engine_request import made_of
from art_patch.types import LEARN_HEADER

_YES = frozenset({"yes", "true", "1", "on"})
_LENGTH = len(LEARN_HEADER)


def without_learn_header(client: Any, options: Any) -> tuple[Any, bool] | None:
    """Return options without the header, and whether it lets the run be learned from; `None` if there is none."""
    try:
        # Of the client itself, because `default_headers` makes a dozen others anew for each call.
        found = [*_found(getattr(client, "_custom_headers", None)), *_found(getattr(options, "headers", None))]
        return _without(options, found) if found else None
    except Exception as error:
        faults.fault("patching.learn_header", error)
        return options, False


def _found(headers: Any) -> list[tuple[str, Any]]:
    if not headers or not isinstance(headers, Mapping):  # of most calls they are not given
        return []
    given = cast("Mapping[Any, Any]", headers)
    # By the length first: this runs in each call.
    return [
        (name, given[name])
        for name in given
        if isinstance(name, str) and len(name) == _LENGTH and name.lower() == LEARN_HEADER
    ]


def _without(options: Any, found: list[tuple[str, Any]]) -> tuple[Any, bool]:
    from openai._types import Omit

    said = [value for _, value in found if not isinstance(value, Omit)]
    own: Any = options.headers if isinstance(options.headers, Mapping) else {}
    # The SDK leaves out what is `Omit`, also of the client's headers, which it finds by their exact names. In a copy,
    # because the app may send the same options again.
    headers = {**own, **dict.fromkeys((name for name, _ in found), Omit())}
    learn = all(_text(value).strip().lower() in _YES for value in said)
    return made_of({**options.__dict__, "headers": headers}, options), learn


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
