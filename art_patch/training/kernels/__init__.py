"""How the trainer computes a model's log-probabilities: attention, LoRA layers, and scoring of sampled tokens.

A beginning that several token sequences have in common is computed once, and the results are exact up to rounding.
"""
