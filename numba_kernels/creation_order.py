"""Numbers that rise from one creation to the next in this process: they tell which of two objects is older."""

from __future__ import annotations

import itertools

next_number = itertools.count().__next__
