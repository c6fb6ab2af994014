"""SQLite and PostgreSQL: opening, transactions, locks, files."""
