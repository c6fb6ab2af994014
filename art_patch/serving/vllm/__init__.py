"""vLLM behind the engine's contract: its own environment, its own processes, and a server of ours in front of them.

::

    app, job --HTTP--> server --> engine --> replica --unix socket--> guard > vLLM
                                     |           starts, watches, restarts, loads every policy again
                                     `-- policies: checked, copied, loaded, proven; which replica answers which call

- `environment`  finds or builds the virtual environment that vLLM lives in, and chooses the engine of this machine
- `process`      one vLLM with all its children: command line, start, end, sweep; it runs under `_lib.group_guard`
- `replica`      one vLLM that is kept alive, and HTTP over its unix socket
- `engine`       all replicas behind the contract
- `forward`      a chat completion on its way through
- `in_worker`    the only file of ours that vLLM itself imports: it corrects a fault of vLLM's CPU kernels

Nothing else here imports vLLM or torch.
"""
