"""Decides whether a call goes to a policy or upstream, and controls one routed call from its start to its end."""
