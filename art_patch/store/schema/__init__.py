"""Tables, and records as rows."""

FIRST = 1
"""Id of the project that a store is bound to, and of that project's first agent."""

EVERY_AGENT = 0
"""`agent_id` in the table `control` of what holds for all agents of a project."""
