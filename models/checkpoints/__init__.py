"""Sources of weights: a hub, a folder, its files and their tensors; or none, for dummy weights."""
