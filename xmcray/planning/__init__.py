"""Before anything runs: bytes, seconds and money of a training, and a refusal of what cannot fit."""
