"""Semantic Kernel: its services, prompts and agents."""

import asyncio
import os

os.environ["SEMANTICKERNEL_EXPERIMENTAL_GENAI_ENABLE_OTEL_DIAGNOSTICS_SENSITIVE"] = "true"

from probe import done

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent, OpenAIResponsesAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Colour(BaseModel):
    """A colour."""

    name: str


class Eyes:
    """A plugin."""

    @kernel_function
    def look(self, at: str) -> str:
        """Look at something."""
        return f"the {at} is blue"


def service(door: str) -> OpenAIChatCompletion:
    """Give the model of a door."""
    return OpenAIChatCompletion(ai_model_id=f"gpt-{door}")


async def main() -> None:
    """Use each door."""
    said = ChatHistory()
    said.add_user_message("hi")
    settings = OpenAIChatPromptExecutionSettings()
    await service("chat").get_chat_message_content(said, settings)
    async for _ in service("stream").get_streaming_chat_message_content(said, settings):
        pass
    typed = OpenAIChatPromptExecutionSettings(response_format=Colour)
    await service("schema").get_chat_message_content(said, typed)
    kernel = Kernel()
    kernel.add_service(service("prompt"))
    await kernel.invoke_prompt("Say hi.")
    await ChatCompletionAgent(service=service("agent"), name="Painter", plugins=[Eyes()]).get_response("hi")
    streaming = ChatCompletionAgent(service=service("agent-stream"), name="Painter", plugins=[Eyes()])
    async for _ in streaming.invoke_stream("hi"):
        pass
    client = OpenAIResponsesAgent.create_client(ai_model_id="gpt-responses")
    agent = OpenAIResponsesAgent(ai_model_id="gpt-responses", client=client, name="Painter")
    await agent.get_response("hi")


trace.set_tracer_provider(TracerProvider())
asyncio.run(main())
done()
