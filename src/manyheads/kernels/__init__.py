"""Triton kernels, and the table that chooses between them and PyTorch's own."""
