"""Sweeps: which settings are best on the validation split; over trainings with Ray Tune, over bundles without it."""
