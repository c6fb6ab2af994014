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
        adds: what the integration adds to the bare patch, in half a line; empty if there is none.
        unseen: what is not seen, with its cure; empty if nothing is known.
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
        adds="chains inside a graph or `trajectory()` with tools and retrievals; answers that a parser cannot read",
    ),
    Framework(
        "LangGraph",
        "langgraph",
        "langgraph",
        ("langchain-core==0.3.*", "langchain-openai==0.3.*", "langgraph==0.3.*", "openai>=1.66,<2"),
        ("langchain-openai>=1.7,<2", "langgraph>=1.2,<2", "openai>=3,<4"),
        adds="one trajectory a run, over interrupts, too: name, `thread_id`, nodes, tools, inner graphs, last state",
    ),
    Framework(
        "OpenAI Agents SDK",
        "openai-agents",
        "openai_agents",
        ("openai-agents==0.3.0",),
        ("openai-agents>=0.24,<1", "websockets>=15,<18"),
        adds="one trajectory a workflow: name, `group_id`, agents, tools, hand-overs, guardrails",
        unseen="its websocket transport, which is warned of: leave it at HTTP",
    ),
    Framework(
        "Pydantic AI",
        "pydantic-ai-slim",
        "pydantic_ai",
        ("pydantic-ai-slim[openai]==1.0.0", "opentelemetry-sdk<1.37"),
        ("pydantic-ai-slim[openai]>=2.68,<3", "opentelemetry-sdk>=1.45,<2"),
        adds="with `Agent.instrument_all()`: one trajectory a run, agents, tools, outputs and calls that were retried",
    ),
    Framework(
        "LiteLLM",
        "litellm",
        "litellm",
        ("litellm==1.80.0",),
        ("litellm>=1.106,<2", "mcp>=2,<3"),
        adds="`hosted_vllm/`, `responses()` and other HTTP clients of its own are recorded",
        unseen="its own HTTP clients are not routed: `api_base=` of `art-patch proxy`",
    ),
    Framework(
        "DSPy",
        "dspy",
        "dspy",
        ("dspy==3.0.0", "litellm>=1.80,!=1.82.7,!=1.82.8"),
        ("dspy>=3.4,<4", "litellm>=1.106,<2", "mcp>=2,<3"),
        adds="one trajectory a program: modules, tools, answers that were not parsed, the metric of `Evaluate`",
        unseen="its own engine `lm15` goes past the SDK: `OPENAI_API_BASE`, or `dspy.LM(..., engine='litellm')`",
    ),
    Framework(
        "Instructor",
        "instructor",
        "instructor",
        ("instructor==1.13.0",),
        ("instructor>=1.17,<2",),
        adds="one trajectory a question with its repetitions; answers that were refused",
    ),
    Framework(
        "Haystack",
        "haystack-ai",
        "haystack",
        ("haystack-ai==2.20.0",),
        ("haystack-ai>=3.4,<4",),
        adds="one trajectory a run: components, retrievals with their documents, tools with results",
    ),
    Framework(
        "Semantic Kernel",
        "semantic-kernel",
        "semantic_kernel",
        ("semantic-kernel==1.38.0", "opentelemetry-sdk<2"),
        ("semantic-kernel>=1.45,<2", "opentelemetry-sdk<2"),
        adds="by OpenTelemetry: agents, and functions with what went in and came out",
    ),
    Framework(
        "Agno",
        "agno",
        "agno",
        ("agno==2.2.8", "openai>=2,<3", "openinference-instrumentation-agno", "opentelemetry-sdk<2"),
        ("agno>=3.1,<4", "openai>=2", "openinference-instrumentation-agno", "opentelemetry-sdk<2"),
        adds="by OpenInference's `AgnoInstrumentor`: one trajectory a run, its session, agents, teams, tools",
    ),
    Framework(
        "Strands",
        "strands-agents",
        "strands",
        ("strands-agents[openai]==1.16.0", "opentelemetry-sdk<2"),
        ("strands-agents[openai,litellm]>=1.62,<2", "opentelemetry-sdk<2"),
        adds="by OpenTelemetry: one trajectory a run, agents, tools with what went in and came out",
    ),
    Framework(
        "Google ADK",
        "google-adk",
        "google_adk",
        ("google-adk==1.18.0", "litellm==1.80.0", "opentelemetry-sdk<2"),
        ("google-adk>=2.13,<3", "litellm>=1.106,<2", "mcp>=2,<3", "opentelemetry-sdk<2"),
        adds="by OpenTelemetry: one trajectory an invocation, its session, agents, tools",
        unseen="Gemini, which has no OpenAI call; `LiteLlm` with LiteLLM's own HTTP clients is not routed",
    ),
    Framework(
        "Microsoft Agent Framework",
        "agent-framework-core",
        "agent_framework",
        ("agent-framework-core==1.0.0", "agent-framework-openai==1.0.0", "opentelemetry-sdk<2"),
        ("agent-framework-core>=1.23,<2", "agent-framework-openai>=1.17,<2", "opentelemetry-sdk<2"),
        adds="by OpenTelemetry: one trajectory a run or workflow, executors, agents, tools",
    ),
    Framework(
        "LlamaIndex",
        "llama-index-core",
        "llama_index",
        ("llama-index-core==0.14.8", "llama-index-llms-openai==0.6.9"),
        ("llama-index-core>=0.14.25,<0.15", "llama-index-llms-openai>=0.8,<0.9"),
        adds="runs of agents, workflows and engines, tools, hand-overs, documents, answers that do not parse",
        unseen="what an engine streams is asked for after its run: recorded by itself",
    ),
    Framework(
        "CrewAI",
        "crewai",
        "crewai",
        ("crewai[litellm]==1.5.0",),
        ("crewai[litellm]>=1.15,<2",),
        adds="crews, flows, tasks, agents, tools, retrievals; outputs that a guardrail refuses",
    ),
    Framework(
        "AutoGen",
        "autogen-agentchat",
        "autogen",
        ("autogen-agentchat==0.6.1", "autogen-ext[openai]==0.6.1", "opentelemetry-sdk<2"),
        ("autogen-agentchat>=0.7.5,<0.8", "autogen-ext[openai]>=0.7.5,<0.8", "opentelemetry-sdk<2"),
        adds="runs of agents and teams; agents and tools, by its OpenTelemetry spans (0.7)",
    ),
    Framework(
        "AG2",
        "ag2",
        "ag2",
        ("ag2[openai]==0.10.0", "openai>=1.66,<2"),
        ("ag2[openai]>=1.2,<2",),
        adds="agents, tools with their results, conversations as sessions; nothing for AG2 Classic",
    ),
    Framework(
        "smolagents",
        "smolagents",
        "smolagents",
        ("smolagents[openai]==1.22.0",),
        ("smolagents[openai]>=1.26,<2",),
        adds="agents, tools and code with their results; answers that cannot be read or are refused",
    ),
    Framework("CAMEL", "camel-ai", "camel", ("camel-ai==0.2.80", "mcp<2"), ("camel-ai>=0.2.90,<0.3", "mcp<2")),
    Framework("Mirascope", "mirascope", "mirascope", ("mirascope[openai]==1.25.7",), ("mirascope[openai]>=2.8,<3",)),
)
