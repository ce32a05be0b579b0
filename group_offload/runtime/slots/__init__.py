"""Device memory that weights are computed from, and how long compute waits for it."""
