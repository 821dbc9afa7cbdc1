"""Triton kernels, each with its torch reference in the same file. Imports torch and triton only."""
