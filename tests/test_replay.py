"""Held plans that repeat themselves: when a graph is recorded and replayed, and that results never depend on it."""

from __future__ import annotations

import contextlib
import threading

import pytest

import cki
from cki.errors import LaunchError
from cki.generated import define

replay = pytest.importorskip("cki.replay")


class Recorder:
    """Stands for an executable on cuda:0, for the graphs of it, and for the driver."""

    class device:
        index = 0

    def __init__(self, monkeypatch):
        self.events = []
        self.capturing = set()
        monkeypatch.setattr(replay.driver, "device_count", lambda: 1)
        monkeypatch.setattr(replay, "ExecutableGraph", self.record)
        self.replay = lambda handle, stream: self.events.append(handle)
        monkeypatch.setattr(replay, "graphLaunch", lambda handle, stream: self.replay(handle, stream))
        monkeypatch.setattr(replay, "streamIsCapturing", lambda stream: stream in self.capturing)

    def record(self, executable, pointers):
        self.events.append("record")
        return type("Graph", (), {"handle": ("replay", *pointers)})()

    def statements(self, names, pointers, finish):
        names |= {"events": self, "is_logging": lambda level: False, "log_steps": None}
        return ["events.events.append('launch')", finish]

    def take(self):
        events, self.events = self.events, []
        return events


def repeated(recorder, count=1):
    """The function `launch(stream, p0, ...)`."""
    names, pointers = {}, [f"p{index}" for index in range(count)]
    body = replay.repeated_statements(recorder, names, pointers, "return")
    return define("launch", ", ".join(["stream", *pointers]), body, names)


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def test_equal_calls_are_recorded_after_a_while_and_then_replayed(recorder):
    launch = repeated(recorder, 2)
    for _ in range(12):
        launch(7, 1, 2)
    assert recorder.take() == ["launch"] * 8 + ["record", "launch"] + [("replay", 1, 2)] * 3
    launch(7, 1, 3)
    launch(7, 1, 2)  # the graph went with its addresses
    assert recorder.take() == ["launch"] * 2


def test_changing_patterns_are_recorded_ever_more_rarely(recorder):
    launch = repeated(recorder)
    for address in range(40):
        for _ in range(20):
            launch(0, address)
    assert recorder.take().count("record") == 2  # after 8 and after 16 equal calls; 32 never come


def test_a_captured_stream_gets_the_launches_themselves(recorder):
    launch = repeated(recorder)
    recorder.capturing.add(5)
    for _ in range(20):
        launch(5, 1)
    assert set(recorder.take()) == {"launch"}
    for _ in range(3):
        launch(6, 1)
    assert recorder.take() == ["record", "launch", ("replay", 1), ("replay", 1)]
    launch(5, 1)
    assert recorder.take() == ["launch"]


def test_the_legacy_stream_beside_a_capture_raises_nothing(recorder):
    def refuse(handle, stream):
        raise replay.CUDARuntimeError(906)

    recorder.replay = refuse
    launch = repeated(recorder)
    for _ in range(20):
        launch(0, 1)
    assert set(recorder.take()) == {"launch", "record"}


def test_a_graph_in_use_by_another_thread_is_not_waited_for(recorder):
    launch = repeated(recorder)
    for _ in range(9):
        launch(0, 1)
    recorder.take()
    inside, go_on = threading.Event(), threading.Event()

    def slow(handle, stream):
        inside.set()
        go_on.wait(10)
        recorder.events.append(handle)

    recorder.replay = slow
    other = threading.Thread(target=launch, args=(0, 1))
    other.start()
    assert inside.wait(10)
    launch(0, 1)
    go_on.set()
    other.join()
    assert recorder.take() == ["launch", ("replay", 1)]


def test_what_cannot_be_recorded_is_launched_as_it_is(recorder, monkeypatch):
    def fail(executable, pointers):
        recorder.events.append("failed")
        raise LaunchError("recording a held plan: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(replay, "ExecutableGraph", fail)
    launch = repeated(recorder)
    for _ in range(40):
        launch(0, 1)
    for _ in range(40):
        launch(0, 2)
    assert recorder.take() == ["launch"] * 8 + ["failed"] + ["launch"] * 72  # and never tried again


def test_a_graph_is_freed_without_breaking_a_capture(monkeypatch):
    inside, freed = [], []

    @contextlib.contextmanager
    def enter(name):
        inside.append(name)
        yield
        inside.remove(name)

    class Api:
        def cuGraphExecDestroy(self, graph):
            freed.append((graph, *inside))

    monkeypatch.setattr(replay.driver, "on_device", enter)
    monkeypatch.setattr(replay.driver, "allowed_while_capturing", lambda: enter("allowed"))
    graph = object.__new__(replay.ExecutableGraph)
    graph._api, graph._index, graph._graph = Api(), 3, "graph"
    del graph
    assert freed == [("graph", 3, "allowed")]


@pytest.mark.gpu
@pytest.mark.torch
def test_results_on_the_gpu_never_depend_on_it():
    torch = pytest.importorskip("torch")
    x, weight = torch.randn(64, 1024, device="cuda"), torch.rand(1024, device="cuda")
    out, other = torch.empty_like(x), torch.empty_like(x)
    held = cki.hold(cki.rms_norm, x, weight, out=out)
    side = torch.cuda.Stream()
    for number in range(60):
        x.fill_(0.0)
        x[:, number] = 1.0 + number
        target = other if number % 13 == 12 else out
        expected = cki.rms_norm(x, weight).clone()
        if number % 3 == 2:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                held(x, weight, out=target)
            torch.cuda.current_stream().wait_stream(side)
        else:
            held(x, weight, out=target)
        assert torch.equal(target, expected), number
    for _ in range(20):
        held(x, weight, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held(x, weight, out=out)
        held(x, weight, out=other)  # which frees the graph for `out`
    x.copy_(torch.randn_like(x))
    graph.replay()
    expected = cki.rms_norm(x, weight)
    assert torch.equal(out, expected)
    assert torch.equal(other, expected)
