"""What an update minimises: losses on recorded tokens, and on answers that are given."""
