"""Small helpers without knowledge of agents, policies or training, each imported by its own file's name.

From the rest of the package a file here imports only `errors` and other files of this folder.
"""
