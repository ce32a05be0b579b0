"""Python reads what generates parts of the pages."""
