"""Pure functions on calls and trajectories that several stages use."""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.trajectories.hashing import ROOT, canonical, chain, node_id, number_tool_calls, prompt_key, verbatim
    from art_patch.trajectories.token_payload import exact_of, hang, sampled_tokens
    from art_patch.trajectories.trainability import ENGINE_PARAMS, KEPT_BY_PROVIDER, PARAMS, why_untrainable
    from art_patch.trajectories.transcripts import as_run, chosen_choice, followed, main_call, offered_tools, transcript
else:
    __getattr__ = lazily()
