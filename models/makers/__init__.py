"""What a model asks for its matrices, vectors and tables."""
