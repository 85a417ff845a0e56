"""Writing with a trained model: cache, sampling, beam search."""
