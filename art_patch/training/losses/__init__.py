"""The losses that an update minimises: policy-gradient losses on sampled tokens, and losses on given answers.

Losses on given answers are imitation (SFT) and preference (DPO).
"""
