"""A thread that runs one call at a time, in the caller's context, while the event loop goes on.

Environments may hold what only the thread that made it may use: a connection to SQLite, a window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OwnThread:
    """See the module. The thread begins with the first call."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="art-patch-environment")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in the thread and return what it does; who is cancelled does not wait for it."""
        context = copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: context.run(function, *args, **kwargs)
        )

    def end(self, last: Callable[[], None] | None = None) -> None:
        """Call `last` when all else is done, and end; waits for nothing."""
        if last is not None:
            self._executor.submit(last)
        self._executor.shutdown(wait=False)
