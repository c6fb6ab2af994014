"""A shop assistant on LiteLLM. Without its two lines of art_patch it is the same."""

import art_patch as art

art.patch()

import json

import litellm

import shop

LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Price of one item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}


def lookup(task, call):
    try:
        return shop.price(task, json.loads(call.function.arguments)["item"])
    except (ValueError, KeyError, TypeError):
        return "no such item"


def run(task):
    messages = [{"role": "user", "content": task["question"]}]
    options = {"temperature": task["temperature"]} if "temperature" in task else {}
    for _ in range(shop.MOST_ANSWERS):
        answer = litellm.completion(
            f"openai/{shop.MODEL}", messages=messages, tools=[LOOKUP], max_tokens=shop.MOST_TOKENS, **options
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        if not message.tool_calls:
            break
        messages += [shop.tool_result(call.id, lookup(task, call)) for call in message.tool_calls]
    return messages


if __name__ == "__main__":
    shop.serve(run)
