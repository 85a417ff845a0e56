"""Looking inside: attention maps and pictures."""
