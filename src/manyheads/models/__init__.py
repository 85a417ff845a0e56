"""Whole models, each a short composition of the blocks."""
