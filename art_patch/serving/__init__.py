"""Serving: the contract every engine keeps, the gate for adapters, and two engines.

`contract` describes the HTTP routes, `client` calls them, `adapters` checks and publishes LoRAs: these import neither
torch nor transformers. `server` is the HTTP side; behind it is `embedded`, which computes in the same process, or
`vllm`, which keeps vLLM processes alive and forwards to them.
"""
