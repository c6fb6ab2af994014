"""Says which trajectory, span and group a call belongs to, and accepts the app's scores and corrections of a run.

In: `trajectory()`, `span()`, `group()` and `suppress()` around the app's code. Out: an `Identity` for each call that
starts; trajectories, spans, scores and corrections for the store. The state lives in the current OpenTelemetry context.
Each call reads it once, when the call starts. docs/pages/explanation/trajectories-and-siblings.md has the rules.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.context.ambient import Identity, Passage, identify, passage_around, passing
    from art_patch.context.replaying import note_no_more, offered, replayable
    from art_patch.context.scopes import bind, group, recorded_only, span, suppress, trajectory
    from art_patch.context.scoring import CAPTURED, assistant_message, correct, current_trajectory, reward, score
    from art_patch.context.threads import carry_threads_off, carry_threads_on
else:
    __getattr__ = lazily()
