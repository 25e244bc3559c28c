"""Scores become loss terms: pure functions without parameters or configuration."""
