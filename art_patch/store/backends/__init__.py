"""The two databases that can hold a store, SQLite and PostgreSQL: how each is opened, written, locked and repaired."""
