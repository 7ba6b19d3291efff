"""Quantised checkpoints in safetensors: which tensors a matrix is stored as, and how they become the one layout of its
numbers (`runtime.linear.quantized`). A file for each way to store them."""
