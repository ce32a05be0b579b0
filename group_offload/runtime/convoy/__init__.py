"""Forwards of several threads that share one pass: see [Note: A convoy] in passes.py."""
