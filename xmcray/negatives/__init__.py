"""Negatives of a query: sampling plans, versioned shortlists, and the pool that refreshes them."""
