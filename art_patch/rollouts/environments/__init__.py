"""Training in games and simulators: an `Environment` gives states and rewards, `GRPOTrainer` trains its `Agent`.

`environment` has the class that a script extends, and its pool; `trainer` plays episodes and makes groups of them;
`adapters` show environments of `gymnasium` and `pettingzoo` as text. An episode is an ordinary rollout.
"""
