"""Translators and encoders from before the Transformer, to compare with."""
