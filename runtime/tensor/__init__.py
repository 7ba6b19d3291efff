"""The Tensor, its storage and views, and the arithmetic of its operators, which importing the package registers."""

from runtime.tensor import arithmetic

__all__ = ["arithmetic"]
