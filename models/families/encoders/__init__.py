"""Encoders: BERT and its relatives."""
