"""Values that only look like LangChain's. LangChain's own go through `langchain_app.py`."""

from __future__ import annotations

from art_patch_integrations.langchain_values import shown
from pydantic import BaseModel


class Document(BaseModel):
    title: str


class BaseMessage(BaseModel):
    text: str


def test_the_apps_own_classes_may_have_langchains_names():
    state = {"found": Document(title="a"), "messages": [BaseMessage(text="b")]}
    assert shown(state) == {"found": {"title": "a"}, "messages": [{"text": "b"}]}
