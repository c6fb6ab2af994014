"""Small helpers without knowledge of agents or training; they import only each other and `errors`."""
