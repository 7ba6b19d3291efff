"""`bench pictures`: from a file to patches, the tower beside its own products, what a known picture saves, and what
encoding does to others' decodes."""
