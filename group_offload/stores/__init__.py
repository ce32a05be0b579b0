"""Where blobs rest: in (pinned) RAM, or in files."""
