"""Decoding: KV caches, beam search, sampling, translation and generation."""
