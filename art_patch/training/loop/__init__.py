"""Runs an update: from a job (its input) and the plan of its optimizer steps to a published policy.

The modules start processes, load the model, compute gradients, make steps and write checkpoints.
"""
