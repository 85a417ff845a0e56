"""The parts of a Transformer."""
