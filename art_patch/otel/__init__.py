"""Turns calls and trajectories into span attributes of OpenTelemetry's conventions for generative AI (`gen_ai.*`).

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
        input_messages,
        operation_of,
        output_messages,
        trajectory_attributes,
        without_empty,
    )
else:
    __getattr__ = lazily(
        __name__,
        {
            "attributes": "as_json call_attributes content_attributes error_type input_messages operation_of "
            "output_messages trajectory_attributes without_empty",
        },
    )
