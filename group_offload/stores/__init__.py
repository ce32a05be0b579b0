"""Where images rest: in (pinned) RAM, or in files."""
