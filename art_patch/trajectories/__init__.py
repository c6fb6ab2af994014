"""Pure functions on calls and trajectories that several stages use."""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.trajectories.conversations import (
        ROOT, as_run, canonical, chain, chosen_choice, followed, main_call, node_id, number_tool_calls, offered_tools,
        prompt_key, transcript, verbatim,
    )
    from art_patch.trajectories.trainability import (
        ENGINE_PARAMS, KEPT_BY_PROVIDER, PARAMS, REASONS, exact_of, hang, sampled_tokens, why_untrainable,
    )
else:
    __getattr__ = lazily()
