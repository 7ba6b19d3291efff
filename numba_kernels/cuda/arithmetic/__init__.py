"""Tensor's own arithmetic: operators, reductions, products of integers, softmax. Models take faster kernels."""
