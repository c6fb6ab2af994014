"""The wrappers on the OpenAI SDK, the streams below it, and calls that go past it."""
