"""Sweeps: which settings are best on the validation split, of trainings (on Ray Tune) or of a finished bundle."""
