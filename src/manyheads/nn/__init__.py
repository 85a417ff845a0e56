"""The parts of a Transformer, each idea in one room."""
