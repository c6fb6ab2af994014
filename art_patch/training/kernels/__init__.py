"""How the trainer computes log-probabilities: attention over common beginnings, LoRA layers, scores of tokens."""
