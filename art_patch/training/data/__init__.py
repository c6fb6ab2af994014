"""Turns recorded calls into rows (token sequences in which the learned tokens are marked), and rows into packs.

A pack holds the tokens of one forward pass. The modules here do no I/O.
"""
