"""Quantised checkpoints in safetensors: the tensors that a matrix is stored as, and their conversion to one layout
(`runtime.linear.quantized`). One file per method."""
