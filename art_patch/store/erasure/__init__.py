"""Erases a person's data with every row that belongs to it, and deletes old trajectories (retention)."""
