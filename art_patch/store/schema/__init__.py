"""Tables, and records as rows."""
