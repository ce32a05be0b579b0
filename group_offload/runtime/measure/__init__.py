"""What passes are counted and measured by."""
