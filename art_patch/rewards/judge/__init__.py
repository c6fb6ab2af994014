"""RULER: a group of siblings -> a question to a judge -> a score for each sibling."""
