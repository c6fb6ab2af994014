"""Tokenizer and chat template of the tiny models: Qwen3's layout, the words of one task in few tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


def make_tokenizer(
    texts: Sequence[str], words: Sequence[str], *, whole_phrases: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE that encodes any text, and those that are given in few tokens.

    Args:
        texts: as the template renders them.
        words: one token each: copying one is then one step of attention. Digits are, too.
        whole_phrases: merge across words and lines up to the next tag, digit or word, for a task that says the same
            phrases again and again. Else lines and words are kept apart, and a prompt's tokens are the same whatever
            follows.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    digits = pre_tokenizers.Digits(individual_digits=True)
    text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole_phrases)
    lines = [] if whole_phrases else [pre_tokenizers.Split("\n", "isolated")]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*lines, digits, text])
    bpe.decoder = decoders.ByteLevel()
    added = (*CONTROL_TOKENS, *TAGS, *words)
    longest_first = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    pieces = [piece for text in texts for piece in re.split(longest_first, text) if piece]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than there is to merge in a small task: training ends when every piece is one token
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(CONTROL_TOKENS),
        show_progress=False,
    )
    bpe.train_from_iterator(pieces, trainer)
    bpe.add_tokens([*TAGS, *words])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=CONTROL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def conversation_tokenizer(
    conversations: Sequence[Sequence[dict[str, Any]]], *, words: Sequence[str], tools: Sequence[dict[str, Any]]
) -> PreTrainedTokenizerFast:
    """A tokenizer for conversations like these; each line about the tools is one token, as it never changes.

    Args:
        conversations: lists of OpenAI messages.
        words: see `make_tokenizer`.
        tools: that all of them offer.
    """
    about_tools: list[str] = []
    if tools:
        system = rendered([{"role": "user", "content": ""}], tools).split(END_OF_TURN, 1)[0]
        tags = "|".join(map(re.escape, (*TAGS, *CONTROL_TOKENS)))
        about_tools = [line for line in re.split(f"{tags}|\n", system) if len(line) > 1]
    return make_tokenizer([rendered(each, tools) for each in conversations], [*words, *about_tools])


def rendered(conversation: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
    """A conversation's text, as the template writes it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    renderer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    return renderer.apply_chat_template(list(conversation), tools=list(tools) or None, tokenize=False)
