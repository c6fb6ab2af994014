"""Training by hand: a script runs its own rollouts and calls `train`, with the names and signatures of OpenPipe ART.

| modules | in -> out |
|---|---|
| `client` | a call of the OpenAI SDK -> an answer with exact tokens in its choices; captures calls as a trajectory |
| `trajectory` | messages and choices -> rollouts |
| `trajectory_group` | rollouts -> groups of siblings with their exceptions -> the store's own records, and metrics |
| `at_once` | coroutines -> rollouts that run at the same time, with a progress bar, retries and limits |
| `batches` | a data set or groups -> the batches of a training loop |
| `model`, `backend` | the classes that a script creates: the model, and the machine that trains and serves it |
| `model_runtime` | a registered model -> its store, engine and trainer; does the work of `train`, `log`, `promote` |
| `forms` | OpenPipe ART's names of arguments and settings -> ours |
| `history` | metrics of groups -> `history.jsonl`, which it reads again |
| `sft`, `handed_over` | conversations to imitate -> a file that the trainer reads -> the next policy |
| `processes` | runs engine and trainer as child processes of the script; groups in the store -> a policy that serves |
| `evaluation` | models and scenarios -> mean metrics, differences between the models, a plot |
| `environments`, `environment_pool` | games and simulators -> workers that play them |
| `grpo`, `checkpoints` | an agent and workers -> rollouts -> the next policy, and back to an earlier one |

Training by hand uses the store, the update, the ledger and the engine of the automatic cycle. Two things differ: the
script decides when to train and on what, and no gate run tests the policy.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.rollouts.at_once import limit_concurrency, retry
    from art_patch.rollouts.backend import LocalBackend, TrainingApi, start
    from art_patch.rollouts.batches import DatasetBatch, iterate_dataset, trajectory_group_batches
    from art_patch.rollouts.client import (
        auto_trajectory, capture_auto_trajectory, capture_yielded_trajectory, yield_trajectory,
    )
    from art_patch.rollouts.environments import (
        Environment, GymnasiumEnvironment, IllegalAction, PettingZooEnvironment,
    )
    from art_patch.rollouts.evaluation import Evaluation, evaluate
    from art_patch.rollouts.grpo import Agent, GRPOTrainer, same_policy
    from art_patch.rollouts.model import Backend, Completion, Model, TrainableModel
    from art_patch.rollouts.model_runtime import TrainResult
    from art_patch.rollouts.sft import TrainSFTConfig, train_sft_from_file
    from art_patch.rollouts.trajectory import History, Messages, MessagesAndChoices, Tools, Trajectory
    from art_patch.rollouts.trajectory_group import TrajectoryGroup, gather_trajectories, gather_trajectory_groups
else:
    __getattr__ = lazily()
