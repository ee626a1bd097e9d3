"""Checkpoints: everything that training needs to resume, written together, atomically, and verified."""

from unisono import _names

__getattr__, __dir__, __all__ = _names.lazy_names(__name__)
