"""Time: optimisation steps, schedules, checkpoints, and the loop on one process or on Ray Train."""
