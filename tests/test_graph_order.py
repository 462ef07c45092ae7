"""Replays of one captured graph from several streams and threads: one behind the other, none lost, none overlapping."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError
from cki.graph import Graph
from tests.conftest import DeviceUnderTest
from tests.threads import in_threads
from tests.toy import affine


class SlowGraph(Graph):
    """A graph that notes how many of its replays run at one moment."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.most = 0

    def _replay(self, stream: int | None) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.002)
        self.running -= 1

    def _free(self) -> None:
        assert not self.running, "freed while it runs"


def test_replays_of_several_threads_do_not_overlap() -> None:
    graph = SlowGraph()
    assert not in_threads(lambda: [graph.replay() for _ in range(5)])
    assert graph.most == 1


def test_closing_waits_for_a_replay_of_another_thread() -> None:
    graph = SlowGraph()

    def replay_until_closed() -> None:
        while True:
            graph.replay()

    threading.Timer(0.02, graph.close).start()
    errors = in_threads(replay_until_closed)
    assert [type(error) for error in errors] == [InvalidArgumentError] * 3
    assert graph.most == 1


def test_no_replay_is_lost_between_threads(device: DeviceUnderTest) -> None:
    """Each adds 1 to the same numbers: replays that overlapped would read one another's input."""
    x = device.array(np.zeros(300, np.float32))
    graph = cki.capture(affine, x, offset=1.0, steps=1, out=x, warmup=0)
    device.synchronize()
    assert not in_threads(lambda: [graph.replay(0) for _ in range(10)], 2)
    device.synchronize()
    np.testing.assert_array_equal(device.numpy(x), 20.0)


@pytest.mark.gpu
@pytest.mark.torch
def test_two_streams_of_torch_replay_one_graph_in_order() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(1 << 22, device="cuda")
    graph = cki.capture(affine, x, offset=1.0, steps=1, out=x, warmup=0)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for number in range(100):
        graph.replay(streams[number % 2])
    torch.cuda.synchronize()
    assert bool((x == 100.0).all())


@pytest.mark.gpu
def test_two_streams_of_cupy_replay_one_graph_in_order() -> None:
    import cupy

    x = cupy.zeros(1 << 22, cupy.float32)
    graph = cki.capture(affine, x, offset=1.0, steps=1, out=x, warmup=0)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.runtime.deviceSynchronize()

    def replay(stream: object) -> None:
        with stream:  # type: ignore[attr-defined]
            for _ in range(50):
                graph.replay()

    threads = [threading.Thread(target=replay, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cupy.cuda.runtime.deviceSynchronize()
    assert bool((x == 100.0).all())
