"""Recorded calls -> rows of token ids with what is trained marked -> packs. Pure."""
