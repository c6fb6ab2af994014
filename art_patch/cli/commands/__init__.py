"""The commands of the command line. Each command builds its settings, calls one function and prints the result."""
