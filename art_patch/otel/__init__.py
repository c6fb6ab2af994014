"""Calls and trajectories in the words of OpenTelemetry's conventions for generative AI (`gen_ai.*`).

https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.otel.attributes import (
        as_json,
        call_attributes,
        content_attributes,
        error_type,
        operation_of,
        request_attributes,
        trajectory_attributes,
        without_empty,
    )
    from art_patch.otel.messages import input_messages, output_messages
else:
    __getattr__ = lazily(
        __name__,
        {
            "attributes": "as_json call_attributes content_attributes error_type operation_of request_attributes "
            "trajectory_attributes without_empty",
            "messages": "input_messages output_messages",
        },
    )
