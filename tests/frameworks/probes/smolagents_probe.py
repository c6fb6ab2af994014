"""smolagents: its model class, and agents that call tools or write code."""

from probe import URL, done

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

HI = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]


@tool
def look(at: str) -> str:
    """Look at something.

    Args:
        at: what.
    """
    return f"the {at} is blue"


def model(name: str) -> OpenAIModel:
    """Make one."""
    return OpenAIModel(name, api_base=URL, api_key="sk-test")


model("gpt-chat").generate(HI)
for _ in model("gpt-stream").generate_stream(HI):
    pass
ToolCallingAgent([look], model("gpt-tools"), max_steps=2).run("hi")
ToolCallingAgent([look], model("gpt-tools-stream"), max_steps=2, stream_outputs=True).run("hi")
CodeAgent([look], model("gpt-code"), max_steps=2).run("hi")
for _ in CodeAgent([look], model("gpt-code-stream"), max_steps=2, stream_outputs=True).run("hi", stream=True):
    pass
done()
