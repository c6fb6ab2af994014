"""Prints what vLLM's own code hands to the chat template. Run by vLLM's Python: requests in, forms out, as JSON."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import hf
from vllm.renderers.chat_utils import parse_chat_messages

CONFIG = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)
OWN = ("add_generation_prompt", "continue_final_message")

forms = []
for body in json.load(sys.stdin):
    request = ChatCompletionRequest.model_validate(body)
    messages, _, _ = parse_chat_messages(request.messages, CONFIG, content_format="string")
    if any(message["role"] == "developer" for message in messages):
        messages = hf._consolidate_system_messages(hf._convert_developer_to_system(messages))
    arguments = request.build_chat_params(None, "auto").chat_template_kwargs
    forms.append(
        {
            "messages": messages,
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "arguments": {key: value for key, value in arguments.items() if key not in OWN},
        }
    )
print(json.dumps(forms))
