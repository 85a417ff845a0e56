"""Claims of the lectures as experiments with a verdict."""
