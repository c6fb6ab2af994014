"""The losses of an update: policy-gradient losses on sampled tokens; imitation (SFT) and preference (DPO)."""
