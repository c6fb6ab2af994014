"""Translates requests for the engine, and checks and rewrites its answers for the app."""
