"""The store's tables, their migrations, and the encoding of the values in them."""

# Id of the project that a store is bound to, and of that project's first agent.
FIRST = 1

# `agent_id` in the table `control` of what holds for all agents of a project.
EVERY_AGENT = 0
