"""What a run does from data to score: the pieces of the way, put together for one task."""
