"""Requests for the engine, and its answers as the app expects them."""
