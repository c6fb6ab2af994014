"""Instructor: a request for a structure is a run, with all its retries; each refused answer scores it.

Each answer that the response model does not accept scores the run `valid` 0; Instructor's hook `parse:error` reports
it. The run has the response model's name, or is the app's own. Requests without a response model are recorded as
without this module. Instructor does not report parts of a stream that the model does not accept.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import wrapt

from art_patch.context.integration import Run, guarded

_RETRYING = ("retry_sync", "retry_async", "retry_sync_v2", "retry_async_v2")
"""Functions that ask until an answer is accepted: before version 2 of Instructor's core, and since."""


def arm(patch: Any) -> None:
    """Wrap the functions that ask, in `instructor.core.patch` or `instructor.v2.core.patch`."""
    for name in _RETRYING:
        retry = getattr(patch, name, None)
        if retry is not None and not isinstance(retry, wrapt.ObjectProxy):
            setattr(patch, name, wrapt.FunctionWrapper(retry, _asking))


def _asking(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    run = None if kwargs.get("response_model") is None else _begun(kwargs)
    if run is None:
        return wrapped(*args, **kwargs)
    if inspect.iscoroutinefunction(wrapped):
        return _awaited(run, wrapped, args, kwargs)
    try:
        with run.inside():
            answer = wrapped(*args, **kwargs)
    except BaseException as error:
        run.end(error=error)
        raise
    run.end()
    return answer


async def _awaited(run: Run, wrapped: Any, args: Any, kwargs: Any) -> Any:
    try:
        with run.inside():
            answer = await wrapped(*args, **kwargs)
    except BaseException as error:
        run.end(error=error)
        raise
    run.end()
    return answer


@guarded("integrations.instructor")
def _begun(kwargs: dict[str, Any]) -> Run:
    """Begin a run that each refused answer scores."""
    run = Run(getattr(kwargs["response_model"], "__name__", None))
    hooks = import_module("instructor.core.hooks").Hooks()  # the app has imported it by now

    @guarded("integrations.instructor")
    def refused(error: Exception, **_: Any) -> None:
        run.score("valid", 0, comment=str(error))

    hooks.on("parse:error", refused)
    given = kwargs.get("hooks")
    kwargs["hooks"] = hooks if given is None else given + hooks
    return run
