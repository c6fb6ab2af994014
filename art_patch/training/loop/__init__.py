"""The update itself: a job and its plan, processes, gradients, steps, checkpoints, and the policy at its end."""
