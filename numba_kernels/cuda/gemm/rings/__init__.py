"""Products of a few rows whose weight comes through a ring of stages in shared memory, by bulk copies."""
