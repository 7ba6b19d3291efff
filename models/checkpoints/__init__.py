"""Where weights come from: a hub, a folder, its files and their tensors; or nowhere, for dummy weights."""
