"""Kernels: tensors in, tensors out. Knows torch (and Triton where it is at hand), and nothing of code or models."""
