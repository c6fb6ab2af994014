"""Small tools that know nothing of agents, policies or training.

Each file is one tool and is imported by its own name (`from art_patch._lib.ids import new_id`). A file here imports
nothing of the package except its neighbours and `errors`.
"""
