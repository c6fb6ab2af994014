"""Reads JSON that somebody may have damaged: what is as expected is returned, and the rest is named."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from art_patch._lib.loose_json import as_object

Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]

_M = TypeVar("_M", bound=BaseModel)


def readable(model: type[_M], value: Any) -> tuple[_M, list[str]]:
    """Return a model whose fields all have defaults, and the names of the fields of `value` that could not be read."""
    # What is no finite number was not measured.
    its = {name: each for name, each in as_object(value).items() if not isinstance(each, float) or math.isfinite(each)}
    try:
        return model.model_validate(its, strict=True), []
    except ValidationError as error:
        unread = sorted({str(each["loc"][0]) for each in error.errors()})
        return model.model_validate(
            {name: each for name, each in its.items() if name not in unread}, strict=True
        ), unread
