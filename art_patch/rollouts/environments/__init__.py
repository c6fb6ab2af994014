"""Games and simulators: what steps, an agent that answers, and a trainer that lets the agent's model learn from both.

| module | in -> out |
|---|---|
| `environment` | a seed -> states, rewards, an end; what a script writes |
| `agent` | what a state says -> the model's answer, with the conversation kept |
| `own_thread`, `environment_pool` | environments at work, each in its own thread, so that a slow one delays no other |
| `episode` | an environment, an agent, a seed -> a trajectory |
| `trainer` | seeds -> groups of episodes -> the next policy |
| `checkpoint` | where a trainer stands, as a file |
| `observation`, `gymnasium_adapter`, `pettingzoo_adapter` | environments of these packages, imported when one is made |

A layer over `rollouts` and no second path: an episode is a rollout as anybody writes one. Importing this package
imports nothing.
"""
