"""Families whose layers keep a state, beside others with attention."""
