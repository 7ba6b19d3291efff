"""Memoised plans: each layer's same launch gets the same object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

MOST_PLANS = 1024

Plan = TypeVar("Plan", bound=Callable[..., Any])


def remembered(plan: Plan) -> Plan:
    """A kernel family's `plan`, which depends on its arguments alone; the answers used last are kept."""
    return functools.lru_cache(MOST_PLANS)(plan)  # type: ignore[return-value]
