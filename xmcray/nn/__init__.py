"""Text becomes vectors, vectors become scores: encoders and the sharded classifier."""
