"""RULER: an LLM judge that ranks the siblings of a group, from the question to the stored scores."""
