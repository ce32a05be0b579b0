"""Which groups are needed next, and which of them are started ahead."""
