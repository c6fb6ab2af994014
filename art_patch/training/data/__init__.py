"""Turns recorded calls into rows, which mark the learned tokens, and rows into packs for forward passes; no I/O."""
