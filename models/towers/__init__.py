"""Encoders of pictures: they make the embeddings that stand for a picture's tokens. They know no text and no engine."""
