"""Runs an update: from a job (its input) and the plan of its optimizer steps to a published policy."""
