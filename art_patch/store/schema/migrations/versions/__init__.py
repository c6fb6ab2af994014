"""The migrations, one file a revision."""
