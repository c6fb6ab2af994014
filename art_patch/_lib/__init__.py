"""Small tools that know nothing of agents, policies or training.

A shelf and no room: each file is one tool, imported by its own name (`from art_patch._lib.ids import new_id`), and none
imports anything of the package but its neighbours here.
"""
