"""Logits processors that a user gives, and what is told as a token's log probability."""
