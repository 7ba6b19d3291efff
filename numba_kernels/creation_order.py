"""Numbers that rise from one creation to the next in this process: the older of two objects has the lower one."""

from __future__ import annotations

import itertools

next_number = itertools.count().__next__
