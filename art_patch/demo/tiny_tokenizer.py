"""The demo's tokenizer and chat template: Qwen3's layout, the shop's words in few tokens."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from art_patch.demo.shop import ITEMS, TOOLS, question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TURN = "<|im_end|>"
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
# Not "special", as in Qwen3: decoding must keep them, a tool-call parser reads them.
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {%- set function = tool.function if tool.function else tool %}
        {{- '\\n{"type": "function", "function": {"name": ' + (function.name | tojson) }}
        {%- if function.description %}
            {{- ', "description": ' + (function.description | tojson) }}
        {%- endif %}
        {{- ', "parameters": ' + (function.parameters | tojson) + '}' + '}' }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nCall one with\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {%- set function = tool_call.function if tool_call.function else tool_call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Qwen3's layout without `<think>`; the words around the tools are fewer, so that the prompt stays short.

A tool is written key by key, where Qwen3 dumps whatever it is given: a server may add keys (`"strict": null`), and a
model this small answers nothing sensible to a prompt it was not trained on (measured: success falls from .26 to 0).
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that encodes any text, and the shop's conversations in few tokens.

    Digits and items are single tokens: copying an item or reading a price is then one step of attention. Merges run
    across words up to the next tag, digit or item, so the tools block costs about as much as a sentence.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    added = (*CONTROL_TOKENS, *TAGS, *ITEMS)
    pieces = [piece for piece in re.split("|".join(map(re.escape, added)), _sample_text()) if piece]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than there is to merge: training ends when every piece is one token
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(CONTROL_TOKENS),
        show_progress=False,
    )
    bpe.train_from_iterator(pieces, trainer)
    bpe.add_tokens([*TAGS, *ITEMS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=CONTROL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _sample_text() -> str:
    """Everything that is said in the shop, digits and items apart, as the template renders it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    renderer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    talk = [asked(2, ITEMS[0]), called(ITEMS[0]), result(2), said("4")]
    return renderer.apply_chat_template(talk, tools=TOOLS, tokenize=False)


def asked(count: int, item: str) -> dict[str, Any]:
    """The message that asks for the price of `count` pieces of `item`."""
    return {"role": "user", "content": question(count, item)}


def called(item: str) -> dict[str, Any]:
    """The model's message that looks `item` up."""
    function = {"name": "lookup", "arguments": json.dumps({"item": item})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "0", "type": "function", "function": function}]}


def result(price: int) -> dict[str, Any]:
    """The shop's message that gives the price of one piece."""
    return {"role": "tool", "tool_call_id": "0", "content": str(price)}


def said(text: str) -> dict[str, Any]:
    """The model's message that says `text` and calls nothing."""
    return {"role": "assistant", "content": text}
