"""Prefetch of the groups that are needed next, and of those that are started ahead."""
