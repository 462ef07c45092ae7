"""`cki.capture`: record a function's launches once, replay them with one submission.

    graph = cki.capture(step, x, cache)      # runs step(x, cache) once, then records it
    graph.replay()                           # same tensors, new contents

On a GPU this is a CUDA graph on the framework's own terms: torch's graph-private memory pool, or for CuPy a pool of
its own.  Whatever is launched inside is captured, CKI's kernels or not.  The simulated device records CKI's launches
alone; other work in the function (NumPy) is done once, at capture.

A graph holds addresses: write new inputs into the captured tensors, read results from `graph.outputs`.  What the
function allocated and let go of is taken again by its later calls, and by graphs that share the memory.

All replays of one graph use that memory, so they run one behind the other, on whatever streams and from whatever
threads they are asked for: the driver orders each behind the graph's launches before it (cuGraphLaunch), a lock the
calls.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from cki import capture_state
from cki.adapter import adapter_of, stream_handle
from cki.capture_state import explained
from cki.device import current
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError


class Graph(ABC):
    """A recorded function.

    outputs: what the function returned when it was recorded; each replay writes these tensors anew.
    num_kernels: kernel launches a replay does.
    framework: "torch", "cupy", or "" on the simulated device.
    """

    framework = ""

    def __init__(self) -> None:
        self.outputs: Any = None
        self.num_kernels = 0
        # Where temporary tensors come from, and the stream of the recording: pools hand memory out again on the
        # stream on which it was given back.
        self.pool: Any = None
        self.recorded_on: Any = None
        self._kept: list[Any] = []
        self._closed = False
        # The driver does not protect a graph from two threads.
        self._lock = threading.RLock()

    def replay(self, stream: Any = None) -> Any:
        """Run the recorded launches on `stream` (default: the framework's current one); returns `outputs`.

        Replays of one graph run in the order of the calls, on several streams too.  The next one writes `outputs`
        anew: what reads them on one stream must be done before a replay on another.  Inside `cki.capture` it raises
        UnsupportedError: the recording would use memory that is this graph's to free.
        """
        _refuse_nested("a replay", "the graph's function inside; or two graphs, replayed one after the other")
        handle = None if stream is None else stream_handle(stream)
        with self._lock:
            if self._closed:
                raise InvalidArgumentError("this graph was closed")
            self._replay(handle)
            return self.outputs

    def close(self) -> None:
        """Free the graph and all memory that it holds, `outputs` included.  Idempotent; also done on deletion."""
        with self._lock:
            self._closed = True
            self.outputs = None
            self._kept = []
            self._free()
            self.pool = self.recorded_on = None

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def _replay(self, stream: int | None) -> None: ...

    @abstractmethod
    def _free(self) -> None: ...


class _SimGraph(Graph):
    """The launches themselves, run again one by one."""

    def __init__(self, launches: list[capture_state.Recorded]) -> None:
        super().__init__()
        self._launches = launches
        self.num_kernels = sum(len(recorded.executable.plan.steps) for recorded in launches)

    def _replay(self, stream: int | None) -> None:
        for recorded in self._launches:
            recorded.executable.launch(recorded.pointers, 0)

    def _free(self) -> None:
        self._launches = []


class _TorchGraph(Graph):
    framework = "torch"

    def __init__(self, graph: Any, device: Any) -> None:
        super().__init__()
        self._graph = graph
        self._device = device

    def _replay(self, stream: int | None) -> None:
        if stream is None:
            self._graph.replay()
            return
        import torch

        # torch replays on the current stream of the graph's device, whichever device is current.
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._device)):
            self._graph.replay()

    def _free(self) -> None:
        self._graph = None


class _CupyGraph(Graph):
    framework = "cupy"

    def __init__(self, graph: Any, device: int) -> None:
        super().__init__()
        self._graph = graph
        self._device = device

    def _replay(self, stream: int | None) -> None:
        import cupy

        with cupy.cuda.Device(self._device):
            self._graph.launch(None if stream is None else cupy.cuda.ExternalStream(stream, self._device))

    def _free(self) -> None:
        self._graph = None


def _refuse_nested(what: str, hint: str) -> None:
    if capture_state.current.get() is not None:
        raise UnsupportedError(f"{what} inside cki.capture", hint=hint)


@contextlib.contextmanager
def _recording(framework: str = "", stream: int | None = None) -> Iterator[capture_state.Recording]:
    recording = capture_state.Recording(framework, stream)
    token = capture_state.current.set(recording)
    capture_state.enter()
    try:
        yield recording
    finally:
        capture_state.leave()
        capture_state.current.reset(token)


def capture(
    function: Callable[..., Any],
    *args: Any,
    warmup: int = 1,
    share_memory: Graph | None = None,
    **kwargs: Any,
) -> Graph:
    """Record `function(*args, **kwargs)` as a graph.

    The framework (torch or CuPy; NumPy or torch on the simulated device) is that of the first tensor among the
    arguments; without any, torch where it is loaded, else CuPy.  Calls on tensors of the other are refused.
    warmup: runs before recording, on a side stream, so that nothing is compiled or loaded inside; with 0 a first call
        inside the capture compiles there, which works too.  The recording itself computes nothing.  Of the simulated
        device it holds the launches of CKI's kernels, and no other work.
    share_memory: an open graph of the same framework and device, whose temporary memory this one uses too.  They must
        not run at the same time; `outputs` of both stay apart.  On the simulated device each graph keeps its own.

    Raises UnsupportedError for frameworks that bring their own graphs (TensorFlow, JAX), inside another capture, and
    for a function that waits for the device, with the line that does; InvalidTypeError or InvalidArgumentError for what
    is no function, no number of runs, no open graph.  What else the function raises passes through.
    """
    if not callable(function):
        raise InvalidTypeError(f"function is {function!r}, which cannot be called")
    if not isinstance(warmup, int) or isinstance(warmup, bool):
        raise InvalidTypeError(f"warmup is {warmup!r}, not an int")
    if warmup < 0:
        raise InvalidArgumentError(f"warmup is {warmup}", hint="0 or more runs")
    _refuse_nested("cki.capture", "one capture of a function that calls both")
    tensor = _first_tensor((args, kwargs))
    framework = "" if tensor is None else adapter_of(tensor).name
    is_sim = current().kind == "sim"
    if framework not in ("", "torch", "numpy" if is_sim else "cupy"):
        raise UnsupportedError(
            f"cki.capture does not take {framework} tensors",
            hint="torch or CuPy tensors; tf.function and jax.jit for others",
        )
    framework = framework or next((name for name in ("torch", "cupy") if name in sys.modules), "cupy")
    if share_memory is not None:
        _check_shared(share_memory, "" if is_sim else framework)
    if is_sim:
        return _capture_sim(function, args, kwargs, warmup)
    capture_on_gpu = _capture_torch if framework == "torch" else _capture_cupy
    try:
        return capture_on_gpu(function, args, kwargs, warmup, tensor, share_memory)
    except Exception as error:
        refusal = explained(error, function)
        if refusal is None:
            raise
        raise refusal from error


def _check_shared(graph: Graph, framework: str) -> None:
    if not isinstance(graph, Graph):
        raise InvalidTypeError(f"share_memory is {graph!r}, not a graph")
    if graph._closed:
        raise InvalidArgumentError("share_memory is a graph that was closed")
    if graph.framework != framework:
        raise InvalidArgumentError(
            f"share_memory is a graph of {graph.framework or 'the simulated device'}, "
            f"this one is of {framework or 'the simulated device'}"
        )


def _first_tensor(value: Any) -> Any:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return next((found for item in value if (found := _first_tensor(item)) is not None), None)
    is_tensor = hasattr(type(value), "__dlpack__") or hasattr(type(value), "__cuda_array_interface__")
    return value if is_tensor else None


def _capture_sim(function: Callable[..., Any], args: Any, kwargs: Any, warmup: int) -> Graph:
    for _ in range(warmup):
        function(*args, **kwargs)
    with _recording() as recording:
        outputs = function(*args, **kwargs)
    graph = _SimGraph(recording.launches)
    graph.outputs = outputs
    graph._kept = [args, kwargs, *recording.kept]
    return graph


def _capture_torch(
    function: Callable[..., Any], args: Any, kwargs: Any, warmup: int, tensor: Any, shared: Graph | None
) -> Graph:
    import torch

    from cki import driver

    device = tensor.device if tensor is not None else torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.device(device):
        here = torch.cuda.current_stream()
        side = torch.cuda.Stream() if shared is None else shared.recorded_on
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(warmup):
                function(*args, **kwargs)
        here.wait_stream(side)
        torch_graph = torch.cuda.CUDAGraph()
        graph = _TorchGraph(torch_graph, device)
        pool = torch.cuda.graph_pool_handle() if shared is None else shared.pool
        recorded = _recording("torch", side.cuda_stream)
        generator = torch.cuda.default_generators[device.index]
        state = None if torch.cuda.is_current_stream_capturing() else generator.get_state()
        try:
            with (
                recorded as recording,
                _own_workspaces(),
                torch.cuda.graph(torch_graph, pool=pool, stream=side),
            ):
                graph.outputs = function(*args, **kwargs)
                graph.num_kernels = driver.count_kernel_nodes(driver.capturing_graph(side.cuda_stream))
        except BaseException:
            torch.cuda.set_stream(here)  # torch leaves the recorded one, where it cannot end the capture
            _give_up_pool(torch_graph, pool, device)
            if state is not None:
                _revive_generator(generator, state, device)
            raise
        graph.pool, graph.recorded_on = pool, side
    graph._kept = [args, kwargs, *recording.kept]
    return graph


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """What torch's own products record inside takes its workspace from the graph's memory, and leaves it there.

    torch keeps one for each stream that a product ran on, 32 MB of cuBLAS's on Hopper.  A graph that recorded one from
    before would read freed memory once torch gives it up, as every recording of `torch.compile` makes it do; and one
    that is kept from here on would outlive the graph.
    """
    import torch

    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _give_up_pool(torch_graph: Any, pool: Any, device: Any) -> None:
    """After a capture that failed.  One that a wait has invalidated ends in torch before its allocator is told: it goes
    on as if the capture did, and gives no memory of any pool back to the GPU."""
    import torch

    try:
        torch_graph.pool()
    except RuntimeError:  # it has not ended
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


def _revive_generator(generator: Any, state: Any, device: Any) -> None:
    """After a capture that failed.  One that a wait has invalidated ends in torch before its random generator is told:
    every later `torch.rand` on that GPU fails then.  The generator goes on from where it was, in a state of its own."""
    import torch

    try:
        torch.empty(1, device=device).uniform_(generator=generator)
        generator.set_state(state)
    except RuntimeError:
        fresh = torch.Generator(device=device)
        fresh.set_state(state)
        generator.graphsafe_set_state(fresh)


def _capture_cupy(
    function: Callable[..., Any], args: Any, kwargs: Any, warmup: int, tensor: Any, shared: Graph | None
) -> Graph:
    import cupy

    from cki import driver

    device = int(tensor.device.id) if tensor is not None else cupy.cuda.runtime.getDevice()
    # Temporaries of the function come from a pool that lives with the graph: nobody else gets their memory.
    pool = cupy.cuda.MemoryPool() if shared is None else shared.pool
    with cupy.cuda.Device(device), cupy.cuda.using_allocator(pool.malloc):
        here = cupy.cuda.get_current_stream()
        side = cupy.cuda.Stream(non_blocking=True) if shared is None else shared.recorded_on
        side.wait_event(here.record())
        with side:
            for _ in range(warmup):
                function(*args, **kwargs)
            side.synchronize()
            with _recording("cupy", side.ptr) as recording:
                side.begin_capture()
                try:
                    outputs = function(*args, **kwargs)
                    num_kernels = driver.count_kernel_nodes(driver.capturing_graph(side.ptr))
                except BaseException:
                    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                        side.end_capture()
                    raise
                graph = _CupyGraph(side.end_capture(), device)
    graph.pool, graph.recorded_on = pool, side
    graph.outputs = outputs
    graph.num_kernels = num_kernels
    graph._kept = [args, kwargs, *recording.kept]
    return graph
