"""The embedded engine: transformers and PEFT in the server process, for machines without a GPU."""
