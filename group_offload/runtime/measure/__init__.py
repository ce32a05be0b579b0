"""Measurements taken in passes: sizes, speeds, times."""
