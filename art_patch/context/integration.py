"""For those who write integrations: what a framework's callbacks tell becomes part of the trajectory.

::

    from art_patch.context.integration import Run, guarded

`Run` and `Step` are told of by events, `guarded` keeps what goes wrong in a callback from the app. README.md in
`integrations/` has an integration in 40 lines. `record_call` is for the few libraries whose calls go past the OpenAI
SDK, and are seen going past (`status().bypasses`).
"""

from art_patch.context.framework_runs import Inside, Run, Step, guarded
from art_patch.context.own_calls import OwnCall, record_call

__all__ = ["Inside", "OwnCall", "Run", "Step", "guarded", "record_call"]
