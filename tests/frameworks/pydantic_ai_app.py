"""An app of Pydantic AI, observed by OpenTelemetry: `pydantic_ai_app.py STORE URL`. Prints the patch's `status()`."""

import asyncio
import json
import sys

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)

from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from pydantic_ai import Agent, ModelRetry  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

trace.set_tracer_provider(TracerProvider())
Agent.instrument_all()
provider = OpenAIProvider(base_url=sys.argv[2], api_key="sk-test")


class Count(BaseModel):
    """What Guide answers."""

    n: int


guide = Agent(OpenAIChatModel("gpt-guide", provider=provider), name="Guide", output_type=Count, retries=3)
painter = Agent(OpenAIChatModel("gpt-painter", provider=provider), name="Painter")


@guide.tool_plain
async def ask_painter(question: str) -> str:
    """Ask the painter."""
    return (await painter.run(question)).output


@guide.tool_plain
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@painter.tool_plain
def look(at: str) -> str:
    """Look at something."""
    if at == "void":
        raise ModelRetry("there is nothing")
    return f"the {at} is blue"


@guide.output_validator
def lucky(found: Count) -> Count:
    """13 is not."""
    if found.n == 13:
        raise ModelRetry("not 13")
    return found


async def main() -> None:
    """Run them, alone, inside a trajectory and inside a trace of the app's own."""
    await guide.run("How many?", conversation_id="visit-1")
    with art.trajectory("app"):
        await painter.run("What colour?")
    with trace.get_tracer("app").start_as_current_span("GET /colour"):
        async with painter.run_stream("What colour?") as result:
            await result.get_output()


asyncio.run(main())
told = art.status()
art.unpatch()
print(json.dumps({"instrumented": told.instrumented, "errors": dict(told.errors), "bypasses": dict(told.bypasses)}))
