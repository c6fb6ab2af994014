"""vLLM behind the engine's contract: its own environment, its own processes, and a server of ours in front of them.

::

    app, job --HTTP--> server --> engine --> replica --unix socket--> guard > vLLM
                                     |           starts, watches, restarts, tells it every policy again
                                     `-- policies: checked, copied, loaded, proven; which replica answers whom

- `environment`  finds or builds the virtual environment that vLLM lives in
- `command`      the command line and variables of one vLLM, as data
- `process`      one vLLM with all its children: started, ended, swept up; it runs under `art_patch._lib.group_guard`
- `link`         HTTP over the unix socket, and the proof that a policy computes what it was trained to
- `replica`      one vLLM that is kept alive
- `engine`       all of them, as the contract has it
- `forward`      a chat completion on its way through
- `in_worker`    what vLLM itself imports of ours: a fault of its CPU kernels, mended

Nothing else here imports vLLM or torch.
"""
