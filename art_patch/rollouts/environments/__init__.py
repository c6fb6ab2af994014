"""Games and simulators: an environment steps, an agent answers, and a trainer lets the agent's model learn.

| module | in -> out |
|---|---|
| `environment` | a seed -> states, rewards, an end; the class that a script writes, and a pool of such environments |
| `trainer` | an environment, an agent, seeds -> groups of episodes -> the next policy |
| `adapters` | environments of the packages `gymnasium` and `pettingzoo`, imported when one is made |

An episode is a rollout like any other that a script could write with `rollouts` alone. Importing this package imports
no other module.
"""
