"""`horovod.data`: a base class of data loaders, and a mixin by which a thread loads batches ahead."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Queue
from threading import Event, Thread
from typing import Any

from . import add_modules

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]


class BaseDataLoader:
    """Iterates over batches. A subclass has `__len__` and `_iterate`, and may change batches in `_process_batch`."""

    def __len__(self) -> int:
        """Return the number of batches."""
        raise NotImplementedError(f"{type(self).__name__} has no __len__")

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches."""
        raise NotImplementedError(f"{type(self).__name__} has no _iterate")

    def _process_batch(self, batch: Any) -> Any:
        """Return the batch as users get it."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Epoch:
    """The batches of one pass over the data, which a thread reads. The last thing that it puts is END.

    END stays in the queue, so that no reader waits after another one, or `close`, has found it.
    """

    END = object()

    def __init__(self, batches: Iterator[Any], ahead: int) -> None:
        self._batches, self._is_closed = batches, Event()
        self._queue: Queue[Any] = Queue(ahead)
        self._thread = Thread(target=self._read, name="horovod-data-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._queue.get()) is not self.END:
            if isinstance(batch, _Failure):
                raise batch.error
            yield batch
        self._queue.put(self.END)

    def close(self) -> None:
        """End the thread after the batch that it reads, and drop what it has read."""
        self._is_closed.set()
        while self._queue.get() is not self.END:  # this makes room, for which the thread may wait
            pass
        self._queue.put(self.END)
        self._thread.join()

    def _read(self) -> None:
        try:
            for batch in self._batches:
                self._queue.put(batch)
                if self._is_closed.is_set():
                    break
        except BaseException as error:  # it is raised where the batches are used
            self._queue.put(_Failure(error))
        finally:
            self._queue.put(self.END)


class AsyncDataLoaderMixin:
    """Stands before a BaseDataLoader among the bases of a class: a thread then reads the batches ahead.

    An iteration ends the one before, and so does `close_async_loader`.

    Args:
        async_loader_queue_size: How many batches are read ahead (default: 64); 0: none, and no thread.
        debug_data_loader: Has no effect.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._epoch: _Epoch | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread, if it runs. A later iteration starts another one."""
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size < 1:
            yield from super().__iter__()  # type: ignore[misc]
            return
        self.close_async_loader()
        self._epoch = epoch = _Epoch(self._iterate(), self.async_loader_queue_size)  # type: ignore[attr-defined]
        try:
            for batch in epoch:
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            epoch.close()


add_modules(__name__, data_loader_base=["AsyncDataLoaderMixin", "BaseDataLoader"])
