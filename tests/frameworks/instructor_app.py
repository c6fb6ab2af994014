"""An app of Instructor: `instructor_app.py STORE URL`. Prints the patch's `status()`."""

import asyncio
import json
import sys
from contextlib import suppress

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)

import instructor  # noqa: E402
from instructor.exceptions import InstructorRetryException  # noqa: E402
from openai import AsyncOpenAI, OpenAI  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from tenacity import Retrying, stop_after_attempt  # noqa: E402


class Count(BaseModel):
    """A number."""

    n: int


THERE = {"base_url": sys.argv[2], "api_key": "sk-test"}
ASKED = {"response_model": Count, "messages": [{"role": "user", "content": "How many?"}]}
client = instructor.from_openai(OpenAI(**THERE))
awaited = instructor.from_openai(AsyncOpenAI(**THERE))
refused = []
client.on("parse:error", refused.append)

assert client.chat.completions.create(model="gpt-again", max_retries=2, **ASKED).n == 3
assert asyncio.run(awaited.chat.completions.create(model="gpt-async", max_retries=2, **ASKED)).n == 3
with suppress(InstructorRetryException):
    client.chat.completions.create(model="gpt-never", max_retries=Retrying(stop=stop_after_attempt(2)), **ASKED)
with art.trajectory(name="app"):
    client.chat.completions.create(model="gpt-app", max_retries=2, **ASKED)
    client.chat.completions.create(model="gpt-plain", response_model=None, messages=ASKED["messages"])

assert art.flush(30)
told = art.status()
art.unpatch()
client.chat.completions.create(model="gpt-unpatched", **ASKED)
shown = {
    "instrumented": told.instrumented,
    "errors": dict(told.errors),
    "bypasses": dict(told.bypasses),
    "refused": len(refused),
}
print(json.dumps(shown))
