"""LangChain and LangGraph: graphs, nodes, tools, retrievals and refused answers become part of the trajectory.

A callback handler, registered for everything that LangChain runs in this process.

- A run of a graph is a run: its name is the graph's, its session the thread (`thread_id`), its output the last state.
  Nodes, tools, retrievals and inner graphs are its steps. A graph that stops in an interrupt and is resumed by the same
  process is one trajectory; if another process resumes it, there are two trajectories of one session. Inside the app's
  `trajectory()` or OpenTelemetry trace the graph is a step of that.
- Tools and parsers of a chain outside of a graph are recorded there, too. A chain with neither a graph nor the app's
  trajectory around it is left alone: it may be one of several calls in a conversation, which the app or the stitching
  puts together.
- An answer that a parser could not read scores `valid` 0.

The patch of the SDK records the calls, never this module: the step is put in force right before the model is called.
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
    """Register the handler once LangChain has imported the module for that."""
    if not _armed:
        _armed.append(module)
        wrapt.register_post_import_hook(_register, "langchain_core.tracers.context")


def _register(context: Any) -> None:
    base = import_module("langchain_core.callbacks.base").BaseCallbackHandler
    handler = type("ArtPatchHandler", (Callbacks, base), {})()
    context.register_configure_hook(ContextVar("art_patch_langchain", default=handler), inheritable=True)


class Callbacks:
    """The callbacks. `_register` adds LangChain's own base class, which only the app imports."""

    run_inline = True  # in the task that calls the model, not in a thread beside it

    def __init__(self) -> None:
        """Begin with an empty tree."""
        self._tree = Tree()

    @guarded(_PLACE)
    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: Any, parent_run_id: Any = None, **told: Any
    ) -> None:
        """A graph, a node of it, or another part without a callback of its own begins."""
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
        """A retrieval begins."""
        self._tree.step(run_id, parent_run_id, told.get("name") or "retriever", "retrieval", input=query)

    on_retriever_end = on_chain_end
    on_retriever_error = on_chain_error

    @guarded(_PLACE)
    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: Any, parent_run_id: Any = None, **told: Any
    ) -> None:
        """A model is about to be called."""
        # In a batch the ends come in another order than the beginnings, so steps could not be taken back. The node
        # around them stays in force.
        if told.get("batch_size", 1) == 1:
            self._tree.model(run_id, parent_run_id)

    on_llm_start = on_chat_model_start

    @guarded(_PLACE)
    def on_llm_new_token(self, token: Any, *, run_id: Any, **_: Any) -> None:
        """A stream has begun and has its step; the app's own work between two chunks must not get it."""
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
            setattr(error, _TOLD, True)  # every enclosing part reports the same error
            part.whole.run.score("valid", 0, comment=str(error))


__all__ = ["Callbacks", "arm", "init_chat_model", "wrap_rollout"]
