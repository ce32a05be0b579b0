"""Where blobs are stored: in (pinned) RAM, or in files."""
