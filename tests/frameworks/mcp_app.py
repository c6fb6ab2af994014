"""An agent of Pydantic AI with a tool of a local MCP server: `mcp_app.py STORE URL`. Prints the patch's `status()`."""

import asyncio
import json
import sys
from pathlib import Path

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)

from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from pydantic_ai import Agent  # noqa: E402
from pydantic_ai.mcp import MCPToolset  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

trace.set_tracer_provider(TracerProvider())
Agent.instrument_all()
SERVER = Path(__file__).parent / "mcp_server.py"


async def main() -> None:
    """Let the agent look."""
    provider = OpenAIProvider(base_url=sys.argv[2], api_key="sk-test")
    there = {"mcpServers": {"eyes": {"command": sys.executable, "args": [str(SERVER)]}}}
    eyes = MCPToolset(there)
    async with Agent(OpenAIChatModel("gpt-painter", provider=provider), name="Painter", toolsets=[eyes]) as agent:
        await agent.run("What colour is the sky?")


asyncio.run(main())
assert art.flush(30)
told = art.status()
art.unpatch()
print(json.dumps({"instrumented": told.instrumented, "errors": dict(told.errors), "bypasses": dict(told.bypasses)}))
