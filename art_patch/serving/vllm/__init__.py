"""vLLM behind the engine's HTTP contract, in its own environment and processes, with our own server in front of it.

::

    app, job --HTTP--> server --> engine --> replica --unix socket--> guard > vLLM
                                     |           starts, watches, restarts, loads every policy again
                                     `-- policies: checked, copied, loaded, proven; which replica answers which call

- `environment`  finds or builds the virtual environment of vLLM, and chooses vLLM or the embedded engine
- `process`      starts and ends one vLLM with all its child processes, and kills what a crashed server left running
- `replica`      keeps one vLLM alive, and sends it HTTP requests over its unix socket
- `engine`       joins all replicas into the one engine that the contract describes, and passes it chat completions
- `in_worker`    the only file of ours that vLLM itself imports: it corrects a bug of vLLM's CPU kernels

No other module of this folder imports vLLM or torch.
"""
