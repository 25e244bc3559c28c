"""Sweeps: the best settings on the validation split, of trainings or of a finished bundle."""
