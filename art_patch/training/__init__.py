"""What was recorded and scored in, a new LoRA out.

In the order in which an update goes:

| files | in -> out |
|---|---|
| `rows`, `rendering`, `demonstrations`, `preferences` | calls -> rows of token ids, what is learned marked |
| `advantages` | rewards of groups -> how much better each sibling did |
| `job`, `plan` | all that an update depends on, as a record and a file -> its optimizer steps |
| `installed`, `running`, `launch`, `ranks` | a job -> this process, or several |
| `update` | the loop: load, score as the policy at the start, step after step, publish |
| `backend`, `loading`, `families` | base model and LoRA -> a model that computes exactly |
| `tree`, `packing`, `scoring`, `attention` | rows -> each distinct token computed once -> log-probabilities |
| `loss`, `supervised`, `gradients` | log-probabilities -> a loss and its gradient |
| `learner`, `checkpoint`, `guards`, `metrics` | a gradient -> a step that can be gone on from, or a reason to end |
| `canary`, `publish` | a trained model -> a policy that engines accept |
| `merge` | a policy -> files that PEFT, transformers and vLLM read |

Nothing here knows the store. Importing the package loads neither torch nor transformers.
"""

from __future__ import annotations

from art_patch.training.config import TrainConfig

__all__ = ["TrainConfig"]
