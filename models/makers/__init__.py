"""The interface that models use to ask for their matrices, vectors and tables."""
