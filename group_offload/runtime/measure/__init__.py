"""What passes teach: sizes, speeds, times."""
