"""The architectures of `transformers` as tables.

Names of tensors and of an architecture's settings stand here alone. What all their models share,
labels, special tokens and activations, is named where it is read; the settings of writing are
named in exchange/writing.py.
"""
