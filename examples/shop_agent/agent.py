"""A shop assistant on the plain OpenAI SDK. Reads tasks as JSON lines, writes conversations as JSON lines.

    {"id": "1", "question": "price of 3 plum?", "prices": {"plum": 4}}   ->   {"id": "1", "messages": [...]}

Nothing here knows of art_patch but the two lines below. Without them it is the same agent, answered by the provider.
"""

import art_patch as art

art.patch()

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI, OpenAIError

MODEL = os.environ.get("SHOP_MODEL", "gpt-5-mini")
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Price of one item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
client = OpenAI()


def lookup(prices, call):
    try:
        return str(prices[json.loads(call.function.arguments)["item"]])
    except (ValueError, KeyError, TypeError):
        return "no such item"


def run(task):
    messages = [{"role": "user", "content": task["question"]}]
    options = {"temperature": task["temperature"]} if "temperature" in task else {}
    for _ in range(3):
        completion = client.chat.completions.create(
            model=MODEL, messages=messages, tools=[LOOKUP], max_completion_tokens=64, **options
        )
        answer = completion.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            result = lookup(task["prices"], call)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return messages


def answer(line):
    task = json.loads(line)
    try:
        result = {"id": task["id"], "messages": run(task)}
    except OpenAIError as error:
        result = {"id": task["id"], "error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with ThreadPoolExecutor(int(os.environ.get("SHOP_THREADS", "32"))) as pool:
        for line in sys.stdin:
            pool.submit(answer, line)
