"""`horovod.data`: base classes of data loaders."""

from __future__ import annotations

from .data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
