"""JSON objects that look somewhat like those of the Responses API."""

from __future__ import annotations

from hypothesis import strategies as st

WORDS = st.sampled_from(
    [
        "type", "role", "content", "input", "output", "message", "function_call", "function_call_output", "reasoning",
        "input_text", "output_text", "refusal", "text", "summary", "call_id", "name", "arguments", "id", "user",
        "assistant", "tools", "function", "web_search", "status", "completed", "incomplete", "failed", "error",
        "incomplete_details", "reason", "usage", "input_tokens", "format", "json_schema", "tool_choice", "response",
        "response.output_item.added", "response.output_item.done", "response.output_text.delta", "output_index",
        "content_index", "delta", "response.function_call_arguments.delta", "response.completed", "item", "prompt",
        "choices", "index", "finish_reason", "n", "instructions", "custom_tool_call", "input_image", "image_url",
    ]
)  # fmt: skip


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats(allow_nan=False) | st.text(max_size=3) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=25,
)


OBJECT = st.dictionaries(WORDS, ANY, max_size=8)
