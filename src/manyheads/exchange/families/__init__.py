"""The architectures of `transformers` as tables: foreign names stand here and nowhere else."""
