"""The device memory that groups are computed with in, and waits for it."""
