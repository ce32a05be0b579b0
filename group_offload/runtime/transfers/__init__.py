"""How the bytes of a group come into a slot: from RAM, or read from files by way of staging memory."""
