"""What these assistants share: the price list, and tasks as JSON lines in, conversations as JSON lines out.

{"id": "1", "question": "price of 3 plum?", "prices": {"plum": 4}}   ->   {"id": "1", "messages": [...]}
"""

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

MODEL = os.environ.get("SHOP_MODEL", "gpt-5-mini")
AT_ONCE = int(os.environ.get("SHOP_THREADS", "32"))
MOST_ANSWERS = 3  # of the model, for one question
MOST_TOKENS = 64  # of an answer


def price(task, item):
    """What the tool says."""
    return str(task["prices"].get(item, "no such item"))


def tool_call(id, name, arguments):
    """An assistant's message that calls a tool, as OpenAI writes it."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]}


def tool_result(id, content):
    """What a tool returned, as OpenAI writes it."""
    return {"role": "tool", "tool_call_id": id, "content": str(content)}


def joined(messages):
    """The parts of one answer as one message."""
    whole = []
    for message in messages:
        if whole and message["role"] == whole[-1]["role"] == "assistant":
            last = whole[-1]
            calls = last.get("tool_calls", []) + message.get("tool_calls", [])
            content = message.get("content") or last.get("content")
            whole[-1] = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        else:
            whole.append(message)
    return whole


def serve(run):
    """Answer each task in a thread."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for line in sys.stdin:
            pool.submit(_answer, run, json.loads(line))


async def serve_async(run):
    """Answer each task in a task of the loop."""
    at_once, loop = asyncio.Semaphore(AT_ONCE), asyncio.get_running_loop()

    async def answer(task):
        async with at_once:
            try:
                _say(task, messages=await run(task))
            except Exception as error:
                _say(task, error=f"{type(error).__name__}: {error}")

    async with asyncio.TaskGroup() as group:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            group.create_task(answer(json.loads(line)))


def _answer(run, task):
    try:
        _say(task, messages=run(task))
    except Exception as error:
        _say(task, error=f"{type(error).__name__}: {error}")


def _say(task, **result):
    sys.stdout.write(json.dumps({"id": task["id"], **result}) + "\n")
    sys.stdout.flush()
