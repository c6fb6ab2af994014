"""Wraps the OpenAI SDK and its streams, and counts the calls that other libraries send without the SDK."""
