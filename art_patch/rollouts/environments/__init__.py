"""Training in games and simulators: an `Environment` gives states and rewards.

`GRPOTrainer` trains the `Agent` that acts.

| module | in -> out |
|---|---|
| `environment` | a seed -> states and rewards of an episode; the class that a script extends, and its pool |
| `trainer` | an environment, an agent and seeds -> groups of episodes -> the next policy |
| `adapters` | a `gymnasium` or `pettingzoo` environment -> an `Environment` whose states and actions are text |

An episode is an ordinary rollout, which a script could also write with `rollouts` alone. Importing this package imports
no other module.
"""
