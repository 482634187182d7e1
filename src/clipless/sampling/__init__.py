"""Poisson batches: drawing records, fetching them, and the loader that yields them."""
