"""Training by hand: whoever writes rollouts themselves, in the words of OpenPipe ART.

| modules | in -> out |
|---|---|
| `client`, `exact`, `capture` | a call of the SDK -> its own answer, whose choices carry the exact tokens |
| `trajectory`, `trajectory_group`, `gather`, `helpers`, `progress` | rollouts -> groups, failures kept beside them |
| `translate` | groups -> the store's own records |
| `model`, `backend`, `session` | what a script calls |
| `station`, `child`, `serving_process` | the project's store, and its `art-patch serve`, joined or started |
| `trainer`, `trainer_process` | groups in the store -> a policy that serves, in a process of its own |
| `logs` | rewards of each step -> `history.jsonl` -> which checkpoints are kept |

A layer and no second path: trajectories go into the same store, are trained on by the same stage of the cycle, from the
same rows of recorded tokens, and the policy is promoted through the same ledger, proven by the same engine. What is
different: the caller says when and on what, and no gate is asked. Importing this package imports nothing.
"""
