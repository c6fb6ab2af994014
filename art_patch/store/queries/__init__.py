"""Reading: each function is one short read transaction."""
