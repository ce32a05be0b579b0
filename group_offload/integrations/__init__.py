"""What makes other libraries see, and use, this engine."""
