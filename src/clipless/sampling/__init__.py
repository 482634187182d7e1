"""Poisson batches: which records are drawn, how they are fetched, and the loader that hands them out."""
