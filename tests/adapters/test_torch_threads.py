"""torch in several threads at once, each on a stream of its own, and memory that goes from stream to stream."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import cki  # noqa: E402

pytestmark = pytest.mark.torch
THREADS, CALLS = 4, 12


def in_threads(drive: Callable[[int], None]) -> None:
    """drive(n) in each thread, all started together; what went wrong in any."""
    start, problems = threading.Barrier(THREADS), []

    def run(number: int) -> None:
        try:
            start.wait(60)
            drive(number)
        except BaseException as error:
            problems.append(f"thread {number}: {error!r}")
            start.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def test_eager_and_compiled_calls_at_once(device):
    """Of the same and of other shapes; the first eager calls too come together.

    torch compiles in one thread: while it traces, it refuses compiled functions in the others.
    """
    if device.kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    place = torch.device("cuda" if device.kind == "cuda" else "cpu")
    weight = torch.linspace(0.5, 2, 72, device=place)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: cki.rms_norm(2 * x, weight) + 1, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        for rows in (1, 2, 3):
            compiled(torch.ones(rows, 72, device=place))

    def drive(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        with cki.device(device.kind), torch.inference_mode():
            for turn in range(CALLS):
                x = torch.randn(1 + (number + turn) % 3, 72, generator=generator).to(place)
                wanted = torch.nn.functional.rms_norm(2 * x, (72,), weight, eps=1e-6)
                torch.testing.assert_close(cki.rms_norm(2 * x, weight), wanted, rtol=1e-4, atol=1e-5)
                if turn % 4 == 0:
                    torch.testing.assert_close(compiled(x), wanted + 1, rtol=1e-4, atol=1e-5)

    in_threads(drive)


@pytest.mark.gpu
def test_each_thread_on_a_stream_of_its_own():
    """Outputs and workspace are dropped at once, so the allocator hands them on: only in the order of their stream."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    x = torch.randn(2, 96, 256, device="cuda", dtype=torch.float16)
    square = [torch.randn(256, 256, device="cuda", dtype=torch.float16) / 16 for _ in range(4)]

    def step(x: torch.Tensor) -> torch.Tensor:
        return cki.fused_attention(cki.layer_norm(x), *square, num_heads=4, head_dim=64)

    wanted = []
    for number in range(THREADS):
        y = x * (number + 1)
        for _ in range(6):
            y = step(y)
        wanted.append(y)
    torch.cuda.synchronize()

    def drive(number: int) -> None:
        stream = torch.cuda.Stream()
        for _ in range(CALLS):
            with torch.cuda.stream(stream):
                y = x * (number + 1)
                for _ in range(6):
                    y = step(y)
            stream.synchronize()
            assert torch.equal(y, wanted[number])
            assert torch.cuda.current_stream() != stream

    in_threads(drive)


@pytest.mark.gpu
def test_memory_of_another_stream_is_held_by_record_stream():
    """x is made on a side stream and dropped while the kernel of the current stream has yet to read it."""
    from tests.adapters.gpu import keep_busy

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    side, main = torch.cuda.Stream(), torch.cuda.Stream()
    source = torch.randn(4096, 1024, device="cuda")
    wanted, zeros = (
        cki.softmax(source),
        torch.zeros_like(source),
    )  # every kernel is loaded before a stream is held up
    keep_busy(main.cuda_stream)
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(side):
            x = source.clone()
        main.wait_stream(side)
        release = keep_busy(main.cuda_stream, until_released=True)
        with torch.cuda.stream(main):
            y = cki.softmax(x)
        x.record_stream(main)
        address = x.data_ptr()
        del x
        with torch.cuda.stream(side):
            other = torch.zeros_like(source)
        assert other.data_ptr() != address
        release()
        torch.cuda.synchronize()
        assert torch.equal(y, wanted) and torch.equal(other, zeros)
