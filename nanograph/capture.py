"""Record a forward pass once, replay it with a few launches: the capture protocol, and its CUDA half.

A capture runs a function while a *segment* records what it launches. A segment is a CUDA graph, or, without a GPU, a
tape of operations (tape.py) with the same rules. A function marked `@graph_break` ends the running segment, runs
eagerly, is remembered, and a new segment begins:

    forward:   embed  qkv  rotary │ attention │ out  moe  qkv  rotary │ attention │ out  moe  logits
    graph:     [    segment 0    ]   break 0   [     segment 1       ]   break 1   [   segment 2   ]

Replaying walks the list. A graph without breaks is one segment: that is the only difference between the modes.

A capture freezes everything but the contents of buffers: addresses, Python numbers, branches taken. Hence the rules:
inputs lie in buffers that never move (batch.py), what varies is read from them on the device, and nothing asks the CPU.

The parts, in order: the marker; Graph, what a capture yields; Recorder, which captures; HostReads and Watch, which
refuse what a graph cannot hold; segments on CUDA. Read first: model.py. Read next: executors/full.py, tape.py.
"""

import functools
import gc
import threading
import traceback
import weakref
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_active = threading.local()  # .recorder: the Recorder that is capturing or warming up in this thread, outside of breaks


class CaptureError(RuntimeError):
    """Something a graph cannot hold, or a graph used against its contract."""


def is_recording():
    """True where what runs now becomes part of a graph (also in the warm-up before), False in a break and outside."""
    return getattr(_active, "recorder", None) is not None


@contextmanager
def _recording(recorder):
    before, _active.recorder = getattr(_active, "recorder", None), recorder
    try:
        yield
    finally:
        _active.recorder = before


def graph_break(function_or_name):
    """Mark a function as a place where a breakable graph may be cut.

    `@graph_break("attention")` breaks where the capture was asked to break at that name; `@graph_break` alone, on a
    function of yours, breaks in every breakable capture. Outside a capture, inside another break and in a full graph
    the call is plain.

    In a replay the function runs again, eagerly. Tensor arguments arrive in fixed buffers with the values of this
    replay, padded to the bucket; every other argument is the *object* passed at capture: numbers are frozen, so live
    values must be read from the batch. It returns None, a tensor or a tuple of tensors, whose first dimension is at
    most the largest bucket's rows; what it returns is copied to a fixed buffer.
    """
    if callable(function_or_name):
        return _mark(function_or_name, None)
    return functools.partial(_mark, name=function_or_name)


def _mark(function, name):
    @functools.wraps(function)
    def call(*args, **kwargs):
        recorder = getattr(_active, "recorder", None)
        if recorder is None or not recorder.breaks_at(name):
            return function(*args, **kwargs)
        return recorder.run_break(function, args, kwargs)

    return call


class Break:
    """One eager operation between two segments: a function, its operands in mailboxes, and mailboxes for its
    results."""

    def __init__(self, function, args, kwargs):
        self.function, self.args, self.kwargs = function, args, kwargs
        self.results = []

    def compute(self):
        """Run the function as a plain call: whatever it is marked with inside runs with it."""
        with _recording(None):
            return self.function(*self.args, **self.kwargs)

    def replay(self):
        result = self.function(*self.args, **self.kwargs)
        for mailbox, tensor in zip(self.results, _as_tuple(result)):
            mailbox.copy_(tensor)


def _as_tuple(result):
    return () if result is None else result if isinstance(result, tuple) else (result,)


class Graph:
    """A captured forward: segments and breaks, in order."""

    def __init__(self, addresses):
        self.addresses = addresses  # where the inputs lay at capture: {name: address}
        self.steps = []

    @property
    def segments(self):
        return [step for step in self.steps if not isinstance(step, Break)]

    @property
    def breaks(self):
        return [step for step in self.steps if isinstance(step, Break)]

    def replay(self, addresses):
        """Run the forward on what its input buffers hold now. Raises CaptureError if an input has moved since the
        capture."""
        if addresses != self.addresses:
            moved = [name for name in self.addresses if addresses.get(name) != self.addresses[name]]
            captured, now = (", ".join(f"{a[name]:#x}" for name in moved) for a in (self.addresses, addresses))
            raise CaptureError(
                f"static input moved: {', '.join(moved)} captured at {captured}, now at {now}. "
                "A graph reads the address of its capture: copy into the buffer, do not replace it"
            )
        for step in self.steps:
            step.replay()


@contextmanager
def no_garbage_collection():
    """Collect once, then not until the end: a collection inside a capture may free another graph, which CUDA
    forbids."""
    if not gc.isenabled():
        yield  # inside a longer session, or the user's own choice
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Recorder:
    """Captures forwards as graphs that share one stream, one memory pool and one set of mailboxes.

    pool: a CudaPool or a TapePool. breaks: names at which to break; none for a full graph. max_rows: rows of the
    largest bucket, which every mailbox is sized for.
    """

    def __init__(self, pool, breaks=frozenset(), max_rows=0):
        self.pool, self.breaks, self.max_rows = pool, breaks, max_rows
        self.mailboxes = {}  # (function, argument, dtype, trailing shape) -> [Mailbox]
        self.graph = self.segment = None  # None while warming up

    def breaks_at(self, name):
        return bool(self.breaks) and (name is None or name in self.breaks)

    def capture(self, forward, addresses=None):
        """Capture `forward()`, a function without arguments or result, and return its Graph. The step has then been
        computed.

        It runs twice: first as a warm-up, plainly (kernels compile, libraries allocate: neither may happen in a
        capture), then recorded. What raises in it, a CaptureError among others, is raised after everything has been put
        back.
        """
        with no_garbage_collection(), self.pool.session(), _recording(self):
            forward()
            self.graph = Graph(addresses or {})
            try:
                self._open_segment()
                forward()
                self._close_segment()
                return self.graph
            finally:
                if self.segment is not None:
                    self.segment.abandon()
                self.graph = self.segment = None

    def _open_segment(self):
        segment = self.pool.segment()
        segment.begin()
        self.segment = segment

    def _close_segment(self):
        segment, self.segment = self.segment, None
        segment.end()
        self.graph.steps.append(segment)

    def run_break(self, function, args, kwargs):
        """End the segment, run `function` eagerly on mailboxes, begin the next segment. Returns the results'
        mailboxes."""
        key = function.__module__, function.__qualname__
        args = [self._post(arg, (*key, index)) for index, arg in enumerate(args)]
        kwargs = {name: self._post(arg, (*key, name)) for name, arg in kwargs.items()}
        if self.graph is not None:
            self._close_segment()
        step = Break(function, args, kwargs)
        result = step.compute()
        handed = tuple(self._hand_out(tensor, (*key, "result", i), step) for i, tensor in enumerate(_as_tuple(result)))
        if self.graph is not None:
            self.graph.steps.append(step)
            self._open_segment()
        return None if result is None else handed if isinstance(result, tuple) else handed[0]

    def _post(self, operand, key):
        """Copy a tensor operand into its mailbox; the copy is part of the segment that ends here."""
        if not isinstance(operand, torch.Tensor):
            return operand
        return self._mailbox(operand, key).cut(operand).copy_(operand)

    def _hand_out(self, result, key, step):
        """Copy a break's result into a mailbox, remember it for the replays, and return what the next segment reads."""
        mailbox = self._mailbox(result, key)
        step.results.append(mailbox.cut(result).copy_(result))
        handed = mailbox.cut(result)
        mailbox.reader = weakref.ref(handed)
        return handed

    def _mailbox(self, tensor, key):
        rows, *rest = tensor.shape or (1,)
        mailboxes = self.mailboxes.setdefault((*key, tensor.dtype, *rest), [])
        for mailbox in mailboxes:
            if mailbox.reader() is None and mailbox.buffer.shape[0] >= rows:
                return mailbox
        if self.segment is not None:
            raise CaptureError(f"{key[1]} got an operand that its warm-up did not: both must take the same path")
        mailboxes.append(Mailbox(tensor.new_zeros(max(rows, self.max_rows), *rest)))
        return mailboxes[-1]


class Mailbox:
    """A fixed buffer in which a tensor crosses a break: one for all layers and buckets.

    It lies outside the graphs' pool, so that what a break holds cannot pin that. Operands are read while the break runs
    and no longer. A result stays in use until the last reference to it is gone: only then may the same function's next
    result take the mailbox; until then it takes another.
    """

    def __init__(self, buffer):
        self.buffer = buffer
        self.reader = lambda: None  # weak reference to the tensor handed out last

    def cut(self, tensor):
        """A view of the buffer in the shape of `tensor`."""
        return self.buffer[: tensor.shape[0] if tensor.ndim else 1].view(tensor.shape)


def source_line():
    """The line of the caller's code that is running: the innermost one outside of torch and of the capture
    machinery."""
    internal = (str(Path(torch.__file__).parent), __file__, str(Path(__file__).with_name("tape.py")))
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(internal):
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"
    return "unknown line"


def refuse(operation, why):
    raise CaptureError(
        f"{operation} cannot be captured ({source_line()}): {why}. "
        "Compute it on the device, or mark the function @graph_break"
    )


class HostReads(TorchFunctionMode):
    """Refuse what hands a tensor's values to Python without the dispatcher seeing it."""

    FORBIDDEN = ("tolist", "numpy", "cpu", "__repr__", "__format__", "__array__", "__dlpack__")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        to_cpu = name == "to" and any(
            str(arg) == "cpu" for arg in (*args[1:], *kwargs.values()) if isinstance(arg, str)
        )
        if to_cpu or (name in self.FORBIDDEN and any(isinstance(arg, torch.Tensor) for arg in args)):
            refuse(name, "it hands values to the CPU, which a replay never asks")
        if name in ("tensor", "as_tensor") and not isinstance(args[0], torch.Tensor):
            refuse(name, "a tensor made from Python values would be frozen; fill a static buffer before the step")
        return func(*args, **kwargs)


class Watch(TorchDispatchMode):
    """See every operation of a segment below autograd, and refuse those that a graph cannot hold, before they run."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.check(func, args, kwargs)
        result = func(*args, **kwargs)
        if func.is_view:  # a view keeps what it views from being given to somebody else
            for view in result if isinstance(result, (list, tuple)) else [result]:
                view.viewed = args[0]
        return result

    def check(self, func, args, kwargs):
        name = str(func).removeprefix("aten.")
        indices = args[1] if "index" in name and len(args) > 1 and isinstance(args[1], (list, tuple)) else []
        by_mask = any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
        if by_mask:
            refuse(name, "a boolean index has as many rows as its values say; torch.where keeps the shape")
        if torch.Tag.data_dependent_output in func.tags:
            refuse(name, "it asks the CPU for a value, which a replay never does")
        if torch.Tag.dynamic_output_shape in func.tags and name != "index.Tensor":
            refuse(name, "the shape of its result depends on values, and a graph's shapes are frozen")
        if torch.Tag.nondeterministic_seeded in func.tags:
            refuse(
                name,
                "random numbers are drawn outside graphs: a replay would repeat the generator's state of the capture",
            )
        if name.startswith("lift_fresh"):
            refuse(name, "a tensor made from Python values would be frozen; fill a static buffer before the step")
        devices = {arg.device.type for arg in args if isinstance(arg, torch.Tensor) and arg.ndim}
        devices |= (
            {torch.device(kwargs["device"]).type} if name.startswith("_to_copy") and kwargs.get("device") else set()
        )
        if len(devices) > 1 and name.startswith(("copy_", "_to_copy")):
            refuse(name, "it copies between CPU and GPU, and a replay would copy from or to the same, stale memory")


class CudaPool:
    """One capture stream and one private memory pool for all segments: blocks of a pool belong to a stream.

    An almost empty first graph is kept for as long as the pool: a pool whose graphs have all gone cannot be used again.
    """

    def __init__(self, device):
        self.device, self.stream, self.anchors = device, torch.cuda.Stream(device), []
        with self.session():
            self.renew()

    def renew(self):
        """Begin a pool. Also needed after a capture that CUDA has invalidated: torch refuses to record to its pool
        again."""
        self.handle = torch.cuda.graph_pool_handle()
        anchor = CudaSegment(self)
        anchor.begin()
        self.anchors.append((anchor, torch.zeros(1, device=self.device)))
        anchor.end()

    @contextmanager
    def session(self):
        """Work on the capture stream, after what the current stream has queued; that one goes on after the session's
        work."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    def segment(self):
        return CudaSegment(self)

    def held_bytes(self):
        """Bytes of device memory that the pool's graphs hold."""
        ours = {tuple(anchor.graph.pool()) for anchor, _ in self.anchors}
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) in ours)


class CudaSegment:
    """One CUDA graph. A capture computes nothing: `end` replays it once, so that what follows sees real values."""

    def __init__(self, pool):
        self.pool, self.graph = pool, torch.cuda.CUDAGraph(keep_graph=True)  # kept: explain.py reads its nodes
        self.watchers = (HostReads(), Watch())

    def begin(self):
        # capture_begin itself, not torch.cuda.graph: that one collects garbage and empties the cache every time.
        self.graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")
        for watcher in self.watchers:
            watcher.__enter__()

    def end(self):
        self._leave()
        self.graph.capture_end()
        self.graph.instantiate()
        self.graph.replay()

    def abandon(self):
        """Leave capture mode after a failure; the half graph is dropped."""
        self._leave()
        try:
            self.graph.capture_end()
        except RuntimeError:  # invalidated, by a synchronization say
            torch._C._cuda_endAllocateToPool(self.pool.device.index, self.pool.handle)
            self.pool.renew()
        torch.cuda.synchronize(self.pool.device)

    def _leave(self):
        for watcher in reversed(self.watchers):
            watcher.__exit__(None, None, None)

    def replay(self):
        self.graph.replay()
