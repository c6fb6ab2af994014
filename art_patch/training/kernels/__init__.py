"""The model's computation, exact and without repeating what rows share: attention, LoRA layers, scoring."""
