"""Decides where a call goes, and leads one routed call from start to end."""
