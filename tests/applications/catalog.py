"""Applications from the package index that nobody here wrote, and hosts, each with one small job done without a person.

The job asks a local server (see `tests/applications/upstream.py`); it must not look different under the patch.
Left out, as they cannot be installed for every Python that we support: fast-agent, mistral-vibe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

QUESTION = "What is a cat?"
TEXT = "A cat is a small animal that lives with people. It sleeps for most of the day and hunts mice at night.\n" * 8
SAMPLES = "".join(json.dumps({"input": f"What is {n} plus {n}?", "target": str(2 * n)}) + "\n" for n in range(4))
KEY = "sk-KEYLEAK0123456789abcdef"
"""The provider's key, which must be in no store."""


class Application(NamedTuple):
    """One application and its job.

    Attributes:
        name: of the job.
        requirements: what pip is asked for.
        command: program of the environment with its arguments; `{url}`, `{host}` and `{home}` are filled in here, in
            variables and in files.
        variables: environment variables.
        files: written into the directory in which it runs.
        past_sdk: it does not use the OpenAI SDK: its calls cannot be recorded, and that must be told.
        returncode: with which it ends.
        varies: regular expressions of what differs between two runs without the patch.
    """

    name: str
    requirements: Sequence[str]
    command: Sequence[str]
    variables: Mapping[str, str] = MappingProxyType({})
    files: Mapping[str, str] = MappingProxyType({})
    past_sdk: bool = False
    returncode: int = 0
    varies: Sequence[str] = ()


MAGENTIC = """
from magentic import prompt
@prompt("What is a {thing}?")
def ask(thing: str) -> str: ...
@prompt("How many legs has a {thing}?")
def legs(thing: str) -> int: ...
print(ask("cat"), legs("cat"))
"""

INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
@tool
def look():
    async def execute(at: str) -> str:
        '''Look.

        Args:
            at: Where to.
        '''
        return "blue"
    return execute
@task
def sums():
    return Task(json_dataset("samples.jsonl"), [use_tools(look()), generate()], scorer=includes())
"""

DEEPEVAL = """
from deepeval import assert_test
from deepeval.metrics import AnswerRelevancyMetric
from deepeval.test_case import LLMTestCase
def test_answer():
    case = LLMTestCase(input="What is a cat?", actual_output="An animal.")
    assert_test(case, [AnswerRelevancyMetric(threshold=0.0, model="gpt-4o")])
"""

MEM0 = """
from mem0 import Memory
memory = Memory()
print(len(memory.add("I like cats.", user_id="u")["results"]))
print(len(memory.search("cats", filters={"user_id": "u"})["results"]))
"""

PAPER_QA = """
import asyncio
from paperqa import Docs, Settings
model = "openai/gpt-4o"
settings = Settings(llm=model, summary_llm=model, embedding="openai/text-embedding-3-small")
settings.agent.agent_llm = settings.parsing.enrichment_llm = model
async def main():
    docs = Docs()
    await docs.aadd("cat.txt", citation="Cat, 2024", docname="cat", settings=settings)
    print((await docs.aquery("What is a cat?", settings=settings)).answer)
asyncio.run(main())
"""

RESEARCHER = """
import asyncio
from gpt_researcher import GPTResearcher
asyncio.run(GPTResearcher(query="What is a cat?").conduct_research())
"""

LM_EVAL = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files: {home}/sums.jsonl
test_split: train
output_type: generate_until
doc_to_text: "{{input}}"
doc_to_target: "{{target}}"
metric_list:
  - metric: exact_match
"""

GRAPHRAG = """
import subprocess
models = ["--model", "gpt-4o", "--embedding", "text-embedding-3-small"]
subprocess.run(["graphrag", "init", "--root", ".", "--force", *models], check=True)
raise SystemExit(subprocess.run(["graphrag", "index", "--root", "."]).returncode)
"""

ANTHROPIC = """
import anthropic
said = anthropic.Anthropic(api_key="k").messages.create(
    model="claude-sonnet-4-5", max_tokens=50, messages=[{"role": "user", "content": "hi"}]
)
print(said.content[0].text)
"""

ASKING = """
from openai import OpenAI

def ask(what="hi"):
    with OpenAI() as client:
        said = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": what}])
    return said.choices[0].message.content

if __name__ == "__main__":
    print(ask())
"""

NOTEBOOK = """
import nbformat
from nbclient import NotebookClient

cells = (
    "from asking import ask\\nask()",
    "from openai import AsyncOpenAI\\nimport asyncio\\n"
    "async def one(n):\\n"
    "    async with AsyncOpenAI() as client:\\n"
    "        said = await client.chat.completions.create(\\n"
    "            model='gpt-4o', messages=[{'role': 'user', 'content': str(n)}])\\n"
    "        return said.choices[0].message.content\\n"
    "await asyncio.gather(*[one(n) for n in range(3)])",
)
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
NotebookClient(book, kernel_name="python3", timeout=100).execute()
print([output.get("data", output) for cell in book.cells for output in cell.outputs])
"""

TESTS = """
import pytest
from asking import ask

@pytest.mark.parametrize("number", range(6))
def test_it_answers(number, capsys, recwarn):
    assert ask(str(number))
    assert (capsys.readouterr(), list(recwarn)) == (("", ""), [])
"""

PROCESSES = """
import sys
from multiprocessing import get_context
from asking import ask

if __name__ == "__main__":
    context = get_context(sys.argv[1])
    pool = context.Pool(2)
    print(pool.map(ask, ["a", "b", "c"]))
    pool.close()
    pool.join()
    process = context.Process(target=ask)
    process.start()
    process.join()
    print(process.exitcode)
"""

HOST = {"OPENAI_BASE_URL": "{url}"}

APPLICATIONS = (
    Application(
        "shell-gpt", ["shell-gpt==1.5.1", "click"], ["sgpt", "--no-cache", "--no-md", QUESTION],
        {"API_BASE_URL": "{url}"},
    ),
    Application(
        "shell-gpt, a chat", ["shell-gpt==1.5.1", "click"], ["sgpt", "--no-cache", "--code", "--chat", "one", QUESTION],
        {"API_BASE_URL": "{url}", "CHAT_CACHE_PATH": "{home}/chat"},
    ),
    Application("llm", ["llm==0.36"], ["llm", "-m", "gpt-4o-mini", QUESTION], {"OPENAI_BASE_URL": "{url}"}),
    Application(
        "llm with a tool", ["llm==0.36"],
        ["llm", "-m", "gpt-4o-mini", "--functions", "def look(at: str) -> str:\n    return 'blue'", QUESTION],
        {"OPENAI_BASE_URL": "{url}"},
    ),
    Application(
        "llm with Claude", ["llm==0.36", "llm-anthropic"],
        ["llm", "-m", "anthropic/claude-sonnet-4-5", "--key", "k", QUESTION],
        {"ANTHROPIC_BASE_URL": "{host}"}, past_sdk=True,
    ),
    Application(
        "anthropic", ["anthropic"], ["python", "ask.py"], {"ANTHROPIC_BASE_URL": "{host}"}, {"ask.py": ANTHROPIC},
        past_sdk=True,
    ),
    Application(
        "mini-swe-agent", ["mini-swe-agent==2.4.6", "mcp"],
        ["mini", "--yolo", "--exit-immediately", "-m", "openai/gpt-4o", "-t", "Say done.", "-l", "0", "-o", "out.json"],
        {"OPENAI_API_BASE": "{url}", "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
    Application(
        "rawdog", ["rawdog-ai"], ["rawdog", QUESTION], {"OPENAI_API_BASE": "{url}"},
        {".rawdog/config.yaml": "llm_model: openai/gpt-4o\n"},
    ),
    Application(
        "magentic", ["magentic"], ["python", "ask.py"], {"MAGENTIC_OPENAI_BASE_URL": "{url}"}, {"ask.py": MAGENTIC}
    ),
    Application(
        "inspect-ai", ["inspect-ai", "openai>=3.4"],
        ["inspect", "eval", "task.py", "--model", "openai/gpt-4o-mini", "--display", "plain", "--max-samples", "4"],
        {"OPENAI_BASE_URL": "{url}"}, {"samples.jsonl": SAMPLES, "task.py": INSPECT},
    ),
    Application(
        "bbook-maker", ["bbook-maker"],
        ["bbook_maker", "--book_name", "book.txt", "--openai_key", KEY, "--api_base", "{url}", "--test", "--test_num",
         "3", "--language", "de"],
        files={"book.txt": TEXT},
    ),
    Application(
        "gptme", ["gptme==0.35.1"], ["gptme", "--non-interactive", "-m", "openai/gpt-4o", QUESTION],
        {"OPENAI_BASE_URL": "{url}"},
    ),
    Application(
        "deepeval", ["deepeval==4.3.1"], ["deepeval", "test", "run", "test_answer.py"],
        {"OPENAI_BASE_URL": "{url}", "DEEPEVAL_TELEMETRY_OPT_OUT": "YES"}, {"test_answer.py": DEEPEVAL},
    ),
    Application(
        "mem0", ["mem0ai"], ["python", "remember.py"], {"OPENAI_BASE_URL": "{url}", "MEM0_TELEMETRY": "False"},
        {"remember.py": MEM0},
    ),
    Application(
        "aider", ["aider-chat==0.86.2"],
        ["aider", "--model", "openai/gpt-4o", "--no-git", "--yes-always", "--no-check-update", "--analytics-disable",
         "--no-show-release-notes", "--no-pretty", "--message", QUESTION],
        {"OPENAI_API_BASE": "{url}"},
    ),
    Application(
        "paper-qa", ["paper-qa"], ["python", "ask.py"], {"OPENAI_API_BASE": "{url}"},
        {"cat.txt": TEXT, "ask.py": PAPER_QA},
    ),
    Application(
        "lm-eval", ["lm-eval[api]==0.4.13"],
        ["lm_eval", "--model", "local-chat-completions", "--model_args",
         "model=gpt-4o,base_url={url}/chat/completions,num_concurrent=1", "--tasks", "sums", "--include_path", "{home}",
         "--apply_chat_template", "--limit", "2"],
        files={"sums.jsonl": SAMPLES, "sums.yaml": LM_EVAL}, past_sdk=True,
    ),
    Application(
        "holmesgpt", ["holmesgpt"], ["holmes", "ask", QUESTION, "--model", "openai/gpt-4o", "--no-interactive"],
        {"OPENAI_API_BASE": "{url}"},
    ),
    Application(
        "gpt-researcher", ["gpt-researcher"], ["python", "ask.py"],
        {"OPENAI_BASE_URL": "{url}", "RETRIEVER": "duckduckgo"}, {"ask.py": RESEARCHER},
        returncode=1,  # after its first call it wants a file from the net
    ),
    Application(
        "graphrag", ["graphrag"], ["python", "index.py"], {"OPENAI_BASE_URL": "{url}", "GRAPHRAG_API_KEY": KEY},
        {"input/cat.txt": TEXT, "index.py": GRAPHRAG}, returncode=1,  # what we answer is no graph
    ),
    Application(
        "garak", ["garak==0.17.1"],
        ["garak", "--model_type", "openai", "--model_name", "gpt-4o", "--probes", "test.Test", "--generations", "1"],
        {"OPENAI_BASE_URL": "{url}"},
    ),
    # Not applications, but what runs them.
    Application("python -m", ["openai", "pytest"], ["python", "-m", "asking"], HOST, {"asking.py": ASKING}),
    Application(
        "pytest", ["openai", "pytest", "pytest-xdist"], ["python", "-m", "pytest", "-q", "-W", "error", "test_it.py"],
        HOST, {"asking.py": ASKING, "test_it.py": TESTS},
    ),
    Application(
        "pytest on two processes", ["openai", "pytest", "pytest-xdist"],
        ["python", "-m", "pytest", "-q", "-n", "2", "-W", "error", "test_it.py"], HOST,
        {"asking.py": ASKING, "test_it.py": TESTS},
    ),
    Application(
        "a notebook", ["openai", "nbclient", "ipykernel"], ["python", "book.py"], HOST,
        {"asking.py": ASKING, "book.py": NOTEBOOK},
    ),
    *(
        Application(
            f"processes that are {how}ed", ["openai", "pytest"], ["python", "many.py", how], HOST,
            {"asking.py": ASKING, "many.py": PROCESSES},
        )
        for how in ("spawn", "fork")
    ),
)  # fmt: skip
