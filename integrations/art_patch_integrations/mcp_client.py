"""MCP: a call of a server's tool is a step, with the server's name, its input and its result.

The client's session is wrapped, so it works under every framework. The step is part of the run in force, below the
framework's own step of the tool, if there is one. Without a run nothing is kept. An error that a tool reports is the
step's error.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import wrapt

from art_patch.context.integration import Run, Step, guarded

_servers: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Names of the servers of sessions. From release 2 on a session knows it itself."""


def arm(module: Any) -> None:
    """Wrap the sessions of `mcp.client.session`."""
    session = module.ClientSession
    if not isinstance(session.__dict__["call_tool"], wrapt.ObjectProxy):
        session.call_tool = wrapt.FunctionWrapper(session.call_tool, _calling)
        session.initialize = wrapt.FunctionWrapper(session.initialize, _meeting)


async def _meeting(wrapped: Any, session: Any, args: Any, kwargs: Any) -> Any:
    result = await wrapped(*args, **kwargs)
    _met(session, result)
    return result


@guarded("integrations.mcp")
def _met(session: Any, result: Any) -> None:
    server = getattr(result, "server_info", None) or getattr(result, "serverInfo", None)
    if server is not None:
        _servers[session] = server.name


async def _calling(wrapped: Any, session: Any, args: Any, kwargs: Any) -> Any:
    step = _begun(session, *args[:2], **kwargs)
    try:
        result = await wrapped(*args, **kwargs)
    except BaseException as error:
        _ended(step, None, error)
        raise
    _ended(step, result, None)
    return result


@guarded("integrations.mcp")
def _begun(session: Any, name: str, arguments: Any = None, **_: Any) -> Step:
    known = getattr(session, "server_info", None)
    server = _servers.get(session) if known is None else known.name
    return Run().step(name, "tool", input=arguments, mcp_server=server)


@guarded("integrations.mcp")
def _ended(step: Step | None, result: Any, error: BaseException | None) -> None:
    if step is None:
        return
    texts = [text for part in getattr(result, "content", None) or () if (text := getattr(part, "text", None))]
    said = "\n".join(texts) if texts else getattr(result, "structured_content", None)
    refused = getattr(result, "is_error", None) or getattr(result, "isError", None)
    step.end(said, error=error or (str(said) if refused else None))
    step.run.end()
