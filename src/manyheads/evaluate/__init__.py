"""Scores, each number with its signature."""
