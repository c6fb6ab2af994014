"""Wraps the OpenAI SDK and its streams, and watches calls that go past it."""
