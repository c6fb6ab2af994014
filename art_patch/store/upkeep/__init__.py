"""Looking after the database: size, log, backups, proofs."""
