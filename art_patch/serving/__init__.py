"""Serving: the contract every engine keeps, the gate for adapters, and the embedded engine.

`contract` describes the HTTP routes, `client` calls them, `adapters` checks and publishes LoRAs: these import neither
torch nor transformers. `embedded` and `server` are the engine itself and belong to the server process alone.
"""
