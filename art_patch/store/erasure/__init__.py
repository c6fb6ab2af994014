"""Deleting a person's data with all that hangs on it, and retention."""
