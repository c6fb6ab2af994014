"""One file a command: settings in, one call, one answer out."""
