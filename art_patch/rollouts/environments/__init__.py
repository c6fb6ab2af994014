"""Games and simulators: an environment steps, an agent answers, and a trainer lets the agent's model learn.

| module | in -> out |
|---|---|
| `environment` | a seed -> states, rewards, an end; the class that a script writes |
| `environment_pool` | environments, each in its own thread, so that a slow one delays no other |
| `episode` | an environment, an agent, a seed -> a trajectory |
| `trainer` | seeds -> groups of episodes -> the next policy, and where the trainer stands, as a file |
| `adapters` | environments of the packages `gymnasium` and `pettingzoo`, imported when one is made |

An episode is a rollout like any other that a script could write with `rollouts` alone. Importing this package imports
nothing.
"""
