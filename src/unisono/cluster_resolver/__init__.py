"""Descriptions of clusters: `unisono.cluster_resolver`. Names are loaded when they are first used."""

from unisono import _names

__getattr__, __dir__, __all__ = _names.lazy_names(__name__)
