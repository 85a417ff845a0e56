"""Models, each a short composition of blocks."""
