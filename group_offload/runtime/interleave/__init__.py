"""Forwards of several threads that share one pass: see [Note: Interleaved passes] in passes.py."""
