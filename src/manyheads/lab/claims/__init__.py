"""What the lectures say, put to the test."""
