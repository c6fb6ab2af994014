"""The embedded engine runs the model with transformers and PEFT in the server process, for machines without a GPU."""
