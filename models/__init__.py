"""Models: config, strict weight loading, and one file for each family of architectures."""
