"""Vectors become answers: indexes, bundles and the retriever. No training code, no Ray."""
