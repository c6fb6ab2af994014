"""Reads the store for the job, the command line and the reports. Each function runs one short read transaction."""
