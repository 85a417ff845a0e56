"""From files to batches of training and test data."""
