"""DSPy: its engine over LiteLLM, and from 3.4 on its own, which goes past the SDK."""

import asyncio
import inspect
from contextlib import suppress

from probe import URL, done

import dspy
from dspy.utils.exceptions import AdapterParseError

LITELLM = {"engine": "litellm"} if "engine" in inspect.signature(dspy.LM.__init__).parameters else {}


class Colour(dspy.Signature):
    """Name a colour."""

    at: str = dspy.InputField()
    colour: str = dspy.OutputField()


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def model(door: str, **options: object) -> object:
    """Give the model of a door."""
    there = {"api_base": URL, "api_key": "sk-test", "cache": False}
    return dspy.context(lm=dspy.LM(f"openai/gpt-{door}", **there, **options))


async def streamed() -> None:
    """Read a stream."""
    listener = dspy.streaming.StreamListener(signature_field_name="colour")
    async for _ in dspy.streamify(dspy.Predict(Colour), stream_listeners=[listener])(at="sky"):
        pass


def ask(door: str, **options: object) -> None:
    """Ask by a model; the server's answer has no fields, which DSPy refuses after it has asked once more for JSON."""
    for kind, work in {
        "": lambda: dspy.Predict(Colour)(at="sky"),
        "-async": lambda: asyncio.run(dspy.Predict(Colour).acall(at="sky")),
        "-stream": lambda: asyncio.run(streamed()),
        "-agent": lambda: dspy.ReAct(Colour, [look], max_iters=1)(at="sky"),
    }.items():
        with model(door + kind, **options), suppress(AdapterParseError, BaseExceptionGroup):
            work()


ask("litellm", **LITELLM)
with model("responses", model_type="responses", **LITELLM) as _:
    dspy.settings.lm("hi")
if LITELLM:
    ask("lm15", engine="lm15")
done()
