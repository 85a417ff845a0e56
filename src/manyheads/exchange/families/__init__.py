"""The architectures of `transformers`, each as tables: foreign names stand here and nowhere else."""
