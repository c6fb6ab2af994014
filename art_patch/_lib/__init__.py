"""Small helper modules without knowledge of agents, policies or training.

Each file is one helper and is imported by its own name (`from art_patch._lib.ids import new_id`). From the rest of the
package a file here imports only `errors` and other files of this folder.
"""
