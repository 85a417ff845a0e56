"""Training: objective, optimizer and schedule, checkpoint, one loop for every task."""
