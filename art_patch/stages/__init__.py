"""The stages of a cycle as they meet the store: each reads records, calls its pure package, writes what came of it.

`cycle.py` puts them in order. A stage's result is in the store before the next begins, so a cycle that was killed goes
on where it stopped.
"""
