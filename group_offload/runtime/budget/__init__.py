"""Measurements of the memory that passes take beside weights, and of the time that they compute."""
