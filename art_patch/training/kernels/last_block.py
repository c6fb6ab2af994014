"""The last block of a model computes its second half only where something is predicted.

After the last attention tokens no longer mix, and only the places from which something is predicted are read. So the
attention's output projection and the MLP of the last block run there alone; elsewhere they give zeros, which nobody
reads. In agent traffic most tokens are prompts and tool results, so this saves most of a block.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class LastBlock:
    """Knows the places. `at_Q` is set before a forward pass and holds until its backward is done; `None` is all."""

    def __init__(self, decoder: Any) -> None:
        """Change the last block of a transformers decoder; blocks of an unknown make stay as they are."""
        self.at_Q: Tensor | None = None
        block = decoder.layers[-1]
        for module in (getattr(getattr(block, "self_attn", None), "o_proj", None), getattr(block, "mlp", None)):
            if module is not None:
                module.forward = self._narrow(module.forward)

    def _narrow(self, whole: Any) -> Any:
        def forward(x_1PW: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.at_Q is None or x_1PW.dim() != 3 or len(x_1PW) != 1:
                return whole(x_1PW, *args, **kwargs)
            part = whole(x_1PW[:, self.at_Q], *args, **kwargs)
            return part.new_zeros((1, x_1PW.shape[1], part.shape[-1])).index_copy(1, self.at_Q, part)

        return forward
