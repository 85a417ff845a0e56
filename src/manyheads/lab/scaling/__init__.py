"""Scaling laws: a sweep over sizes and tokens, its fit, and a prediction put to the test."""
