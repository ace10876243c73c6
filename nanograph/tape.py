"""Graphs without a GPU: a segment is a tape of operations, with the same rules as a CUDA graph and none of its speed.

While a segment is captured, every operation below autograd runs and is recorded with its arguments. A replay runs each
again and copies its result into the tensor recorded at capture: like a CUDA graph, a tape reads and writes fixed
addresses and has frozen its arguments. Views only alias, so they are not run again; operations that change a tensor in
place are just run.

Memory behaves like a graph pool, too: a result that dies during the capture gives its memory to the pool, and the next
result of this or any other tape takes it. So tapes of several buckets overlap, as CUDA graphs do, and whoever keeps a
result that a tape owns sees it overwritten.

Read first: capture.py, whose protocol this follows. Read next: executors/full.py.
"""

import weakref
from contextlib import contextmanager

import torch

from nanograph.capture import HostReads, Watch


class TapePool:
    """Memory shared by all tapes of an executor."""

    def __init__(self):
        self.free = []  # storages that nobody refers to any more
        self.total = 0

    @contextmanager
    def session(self):
        yield

    def segment(self):
        return TapeSegment(self)

    def held_bytes(self):
        """Bytes that the tapes' results take."""
        return self.total

    def hold(self, result):
        """Move a fresh result into memory of the pool. The memory is free again when the returned tensor is gone."""
        storage = self._take(result.untyped_storage().nbytes())
        held = torch.empty(0, dtype=result.dtype).set_(storage, 0, result.size(), result.stride())
        weakref.finalize(held, self.free.append, storage).atexit = False
        return held.copy_(result)

    def _take(self, nbytes):
        """The smallest free storage that is large enough, or a new one. Storages are not split: none far too large."""
        most = max(4 * nbytes, 2**16)
        fitting = [index for index, storage in enumerate(self.free) if nbytes <= storage.nbytes() <= most]
        if fitting:
            return self.free.pop(min(fitting, key=lambda index: self.free[index].nbytes()))
        self.total += nbytes
        return torch.UntypedStorage(nbytes)


class TapeSegment(Watch):
    """A recorded list of operations: [(operation, arguments, keyword arguments, results)]."""

    def __init__(self, pool):
        super().__init__()
        self.pool, self.host_reads = pool, HostReads()
        self.operations = []

    def begin(self):
        self.host_reads.__enter__()
        self.__enter__()

    def end(self):
        self.__exit__(None, None, None)
        self.host_reads.__exit__(None, None, None)

    abandon = end

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.is_view:
            return result
        if func._schema.is_mutable:
            results = ()
        else:
            result = _map_tensors(self.pool.hold, result)
            results = _map_tensors(torch.Tensor.detach, _tensors(result))
        # The tape refers to aliases: the capture's own tensors must be free to die, or no memory would ever be reused.
        aliases = _map_tensors(torch.Tensor.detach, (list(args), kwargs))
        self.operations.append((func, *aliases, results))
        return result

    def replay(self):
        for func, args, kwargs, results in self.operations:
            fresh = func(*args, **kwargs)
            for recorded, tensor in zip(results, _tensors(fresh)):
                recorded.copy_(tensor)


def _map_tensors(function, value):
    """Apply `function` to every tensor in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(function, item) for item in value)
    return value


def _tensors(value):
    """The tensors of a result: a tensor, or a list or tuple of them."""
    return [
        item for item in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(item, torch.Tensor)
    ]
