"""A group of weights: what it is made of, and where it is."""
