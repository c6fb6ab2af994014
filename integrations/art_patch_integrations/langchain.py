"""LangChain and LangGraph: graphs, nodes, tools, retrievals and what parsers refused become part of the trajectory.

A callback handler, registered for everything that LangChain runs in this process.

- A run of a graph is a run: its name is the graph's, its session the thread (`thread_id`), its output the last state.
  Nodes, tools, retrievals and graphs inside the graph are its steps. One that stops in an interrupt and is resumed by
  the same process is one trajectory; by another process, two of one session. In the app's `trajectory()` or
  OpenTelemetry trace the graph is a step of that.
- The tools and parsers of a chain outside of a graph take part there, too. Where there is neither, a chain is left
  alone: it may be one of several in a conversation, which the app knows, or the stitching finds.
- An answer that a parser could not read is judged `valid` 0.

Calls are recorded by the patch of the SDK, never here: the step is put in force right before the model is called.
"""

from __future__ import annotations

from contextvars import ContextVar
from importlib import import_module
from typing import Any

import wrapt

from art_patch.context.integration import guarded
from art_patch_integrations.langchain_rollouts import init_chat_model, wrap_rollout
from art_patch_integrations.langchain_tree import Tree
from art_patch_integrations.langchain_values import is_a, is_node, output_of_tool, shown

_PLACE = "integrations.langchain"
_TOLD = "_art_patch_told"
_armed: list[Any] = []


def arm(module: Any) -> None:
    """Have the handler registered, as soon as LangChain has brought the place where that is done."""
    if not _armed:
        _armed.append(module)
        wrapt.register_post_import_hook(_register, "langchain_core.tracers.context")


def _register(context: Any) -> None:
    base = import_module("langchain_core.callbacks.base").BaseCallbackHandler
    handler = type("ArtPatchHandler", (Callbacks, base), {})()
    context.register_configure_hook(ContextVar("art_patch_langchain", default=handler), inheritable=True)


class Callbacks:
    """What LangChain calls. With LangChain's own class as a base, which is not imported before the app does."""

    run_inline = True  # in the task that calls the model, not in a thread beside it

    def __init__(self) -> None:
        """Nothing runs."""
        self._tree = Tree()

    @guarded(_PLACE)
    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: Any, parent_run_id: Any = None, **told: Any
    ) -> None:
        """A graph, a node of it, or anything else that is none of the below begins."""
        if is_node(told):
            self._tree.step(run_id, parent_run_id, told.get("name") or "node", "node")
        else:
            self._tree.chain(run_id, parent_run_id, {**told, "inputs": inputs})

    @guarded(_PLACE)
    def on_chain_end(self, outputs: Any, *, run_id: Any, **_: Any) -> None:
        """It ended."""
        self._tree.end(run_id, shown(outputs))

    @guarded(_PLACE)
    def on_chain_error(self, error: BaseException, *, run_id: Any, **_: Any) -> None:
        """It failed, or was interrupted."""
        self._judge(run_id, error, "OutputParserException")
        self._tree.end(run_id, error=error)

    @guarded(_PLACE)
    def on_tool_start(
        self, serialized: Any, input_str: str, *, run_id: Any, parent_run_id: Any = None, **told: Any
    ) -> None:
        """A tool begins."""
        name = told.get("name") or (serialized or {}).get("name") or "tool"
        given, call_id = told.get("inputs") or input_str, told.get("tool_call_id")
        self._tree.step(run_id, parent_run_id, name, "tool", input=shown(given), tool_call_id=call_id)

    @guarded(_PLACE)
    def on_tool_end(self, output: Any, *, run_id: Any, **_: Any) -> None:
        """It ended."""
        result, known = output_of_tool(output)
        self._tree.end(run_id, result, **known)

    on_tool_error = on_chain_error

    @guarded(_PLACE)
    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: Any, parent_run_id: Any = None, **told: Any
    ) -> None:
        """Documents are looked for."""
        self._tree.step(run_id, parent_run_id, told.get("name") or "retriever", "retrieval", input=query)

    on_retriever_end = on_chain_end
    on_retriever_error = on_chain_error

    @guarded(_PLACE)
    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: Any, parent_run_id: Any = None, **told: Any
    ) -> None:
        """A model is about to be called."""
        # Of several in one the ends come in an order in which nothing can be taken back; their node is in force.
        if told.get("batch_size", 1) == 1:
            self._tree.model(run_id, parent_run_id)

    on_llm_start = on_chat_model_start

    @guarded(_PLACE)
    def on_llm_new_token(self, token: Any, *, run_id: Any, **_: Any) -> None:
        """A stream has begun, and knows where it belongs; what the app does between two chunks does not."""
        part = self._tree.get(run_id)
        if part is not None:
            part.leave()

    @guarded(_PLACE)
    def on_llm_end(self, response: Any, *, run_id: Any, **_: Any) -> None:
        """It answered."""
        self._tree.end(run_id)

    @guarded(_PLACE)
    def on_llm_error(self, error: BaseException, *, run_id: Any, **_: Any) -> None:
        """It failed, or the SDK could not read what it answered."""
        self._judge(run_id, error, "OutputParserException", "ValidationError")
        self._tree.end(run_id, error=error)

    def _judge(self, run_id: Any, error: BaseException, *names: str) -> None:
        part = self._tree.get(run_id)
        if part is not None and part.whole is not None and is_a(error, *names) and not hasattr(error, _TOLD):
            setattr(error, _TOLD, True)  # it is told again by everything around
            part.whole.run.score("valid", 0, comment=str(error))


__all__ = ["Callbacks", "arm", "init_chat_model", "wrap_rollout"]
