"""Which labels a query must meet: sampling plans, versioned shortlists and the pool that refreshes them."""
