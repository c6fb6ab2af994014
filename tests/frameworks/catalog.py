"""The frameworks that `run.py` tries: what pip is asked for, the probe, and the words of the framework matrix for each.

A line of data a framework. `oldest` is the oldest release whose probe passes; `newest` has an upper bound at the next
major. Each is tried in an environment of its own.
"""

from __future__ import annotations

from typing import NamedTuple


class Framework(NamedTuple):
    """A framework, its releases and its probe.

    Attributes:
        name: as its people write it.
        package: whose version is shown.
        probe: `probes/PROBE_probe.py`.
        oldest: pip's arguments.
        newest: pip's arguments.
        adds: what the integration adds to the recorded calls, in half a line; empty if there is no integration.
        unseen: which calls are not recorded or cannot be routed, with the cure; empty if none are known.
    """

    name: str
    package: str
    probe: str
    oldest: tuple[str, ...]
    newest: tuple[str, ...]
    adds: str = ""
    unseen: str = ""


FRAMEWORKS = (
    Framework(
        "LangChain",
        "langchain-core",
        "langchain",
        ("langchain-core==0.3.*", "langchain-openai==0.3.*", "openai>=1.66,<2"),
        ("langchain-core>=1.4,<2", "langchain-openai>=1.7,<2", "openai>=3,<4"),
        adds=(
            "chains inside a graph or a `trajectory()`, with their tools and retrievals; the score `valid` 0 if a "
            "parser cannot read an answer"
        ),
    ),
    Framework(
        "LangGraph",
        "langgraph",
        "langgraph",
        ("langchain-core==0.3.*", "langchain-openai==0.3.*", "langgraph==0.3.*", "openai>=1.66,<2"),
        ("langchain-openai>=1.7,<2", "langgraph>=1.2,<2", "openai>=3,<4"),
        adds=(
            "one trajectory for each run, also if an interrupt divides it, with name, `thread_id`, nodes, tools, "
            "inner graphs and final state"
        ),
    ),
    Framework(
        "OpenAI Agents SDK",
        "openai-agents",
        "openai_agents",
        ("openai-agents==0.3.0",),
        ("openai-agents>=0.24,<1", "websockets>=15,<18"),
        adds=(
            "one trajectory for each workflow, with name, `group_id`, agents, tools, hand-overs between agents, "
            "and guardrails"
        ),
        unseen=(
            "calls over its websocket transport, of which a warning tells, are not recorded: keep the HTTP "
            "transport, the default"
        ),
    ),
    Framework(
        "Pydantic AI",
        "pydantic-ai-slim",
        "pydantic_ai",
        ("pydantic-ai-slim[openai]==1.0.0", "opentelemetry-sdk<1.37"),
        ("pydantic-ai-slim[openai]>=2.68,<3", "opentelemetry-sdk>=1.45,<2"),
        adds=(
            "with `Agent.instrument_all()`, one trajectory for each run, with agents, tools, outputs, and the "
            "calls that were repeated"
        ),
    ),
    Framework(
        "LiteLLM",
        "litellm",
        "litellm",
        ("litellm==1.80.0",),
        ("litellm>=1.106,<2", "mcp>=2,<3"),
        adds="calls by LiteLLM's own HTTP clients (`hosted_vllm/`, `responses()` and others) are recorded, too",
        unseen=(
            "calls by its own HTTP clients are recorded but cannot go to the champion: set `api_base=` to the "
            "address of `art-patch proxy`"
        ),
    ),
    Framework(
        "DSPy",
        "dspy",
        "dspy",
        ("dspy==3.0.0", "litellm>=1.80,!=1.82.7,!=1.82.8"),
        ("dspy>=3.4,<4", "litellm>=1.106,<2", "mcp>=2,<3"),
        adds=(
            "one trajectory for each program, with modules, tools, answers that could not be parsed, and the "
            "metric of `Evaluate` as a score"
        ),
        unseen=(
            "calls by its own engine `lm15` bypass the SDK: set `OPENAI_API_BASE` to `art-patch proxy`, or use "
            "`dspy.LM(..., engine='litellm')`"
        ),
    ),
    Framework(
        "Instructor",
        "instructor",
        "instructor",
        ("instructor==1.13.0",),
        ("instructor>=1.17,<2",),
        adds="one trajectory for each question, with its repeated requests; answers that Instructor refused",
    ),
    Framework(
        "Haystack",
        "haystack-ai",
        "haystack",
        ("haystack-ai==2.20.0",),
        ("haystack-ai>=3.4,<4",),
        adds="one trajectory for each run, with components, retrievals and their documents, and tools with results",
    ),
    Framework(
        "Semantic Kernel",
        "semantic-kernel",
        "semantic_kernel",
        ("semantic-kernel==1.38.0", "opentelemetry-sdk<2"),
        ("semantic-kernel>=1.45,<2", "opentelemetry-sdk<2"),
        adds="from OpenTelemetry spans, agents and functions, with inputs and outputs",
    ),
    Framework(
        "Agno",
        "agno",
        "agno",
        ("agno==2.2.8", "openai>=2,<3", "openinference-instrumentation-agno", "opentelemetry-sdk<2"),
        ("agno>=3.1,<4", "openai>=2", "openinference-instrumentation-agno", "opentelemetry-sdk<2"),
        adds=(
            "with OpenInference's `AgnoInstrumentor`, one trajectory for each run, with session, agents, teams "
            "and tools"
        ),
    ),
    Framework(
        "Strands",
        "strands-agents",
        "strands",
        ("strands-agents[openai]==1.16.0", "opentelemetry-sdk<2"),
        ("strands-agents[openai,litellm]>=1.62,<2", "opentelemetry-sdk<2"),
        adds="from OpenTelemetry spans, one trajectory for each run, with agents, and tools with inputs and outputs",
    ),
    Framework(
        "Google ADK",
        "google-adk",
        "google_adk",
        ("google-adk==1.18.0", "litellm==1.80.0", "opentelemetry-sdk<2"),
        ("google-adk>=2.13,<3", "litellm>=1.106,<2", "mcp>=2,<3", "opentelemetry-sdk<2"),
        adds="from OpenTelemetry spans, one trajectory for each invocation, with session, agents and tools",
        unseen=(
            "calls to Gemini are not recorded, because they do not use the OpenAI API; calls of `LiteLlm` by "
            "LiteLLM's own HTTP clients cannot go to the champion"
        ),
    ),
    Framework(
        "Microsoft Agent Framework",
        "agent-framework-core",
        "agent_framework",
        ("agent-framework-core==1.0.0", "agent-framework-openai==1.0.0", "opentelemetry-sdk<2"),
        ("agent-framework-core>=1.23,<2", "agent-framework-openai>=1.17,<2", "opentelemetry-sdk<2"),
        adds="from OpenTelemetry spans, one trajectory for each run or workflow, with executors, agents and tools",
    ),
    Framework(
        "LlamaIndex",
        "llama-index-core",
        "llama_index",
        ("llama-index-core==0.14.8", "llama-index-llms-openai==0.6.9"),
        ("llama-index-core>=0.14.25,<0.15", "llama-index-llms-openai>=0.8,<0.9"),
        adds=(
            "one trajectory for each run of an agent, workflow or engine, with tools, hand-overs, retrieved "
            "documents, and answers that could not be parsed"
        ),
        unseen=(
            "a streamed answer of an engine is requested after the engine's run has ended, so this call is "
            "recorded as a trajectory of its own"
        ),
    ),
    Framework(
        "CrewAI",
        "crewai",
        "crewai",
        ("crewai[litellm]==1.5.0",),
        ("crewai[litellm]>=1.15,<2",),
        adds=(
            "one trajectory for each run of a crew, flow or agent, with tasks, agents, tools, retrievals, and "
            "outputs that a guardrail refused"
        ),
    ),
    Framework(
        "AutoGen",
        "autogen-agentchat",
        "autogen",
        ("autogen-agentchat==0.6.1", "autogen-ext[openai]==0.6.1", "opentelemetry-sdk<2"),
        ("autogen-agentchat>=0.7.5,<0.8", "autogen-ext[openai]>=0.7.5,<0.8", "opentelemetry-sdk<2"),
        adds=(
            "one trajectory for each run of an agent or team; from release 0.7 on also agents and tools, from "
            "AutoGen's OpenTelemetry spans"
        ),
    ),
    Framework(
        "AG2",
        "ag2",
        "ag2",
        ("ag2[openai]==0.10.0", "openai>=1.66,<2"),
        ("ag2[openai]>=1.2,<2",),
        adds="agents, tools with their results, and the conversation as session; for AG2 Classic it adds nothing",
    ),
    Framework(
        "smolagents",
        "smolagents",
        "smolagents",
        ("smolagents[openai]==1.22.0",),
        ("smolagents[openai]>=1.26,<2",),
        adds="agents, tools and code with their results, and answers that could not be parsed or were refused",
    ),
    Framework("CAMEL", "camel-ai", "camel", ("camel-ai==0.2.80", "mcp<2"), ("camel-ai>=0.2.90,<0.3", "mcp<2")),
    Framework("Mirascope", "mirascope", "mirascope", ("mirascope[openai]==1.25.7",), ("mirascope[openai]>=2.8,<3",)),
)
