"""TensorFlow, PyTorch and a transformers model in one process at the same time, each with CKI's kernels.

    python side_by_side.py tensorflow|torch ROUNDS

The first argument is the framework that comes first: its import, its device context, its first call.  Threads call
TensorFlow's operations on each of its devices (in eager mode and in functions), torch's on its last device while the
first one is current, and the main thread a model on the last device.  Every result is compared with the first one of
its kind, which is compared with the framework's own.

A program of its own: where native code faults, its output says where each thread was.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

faulthandler.enable()
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402

import cki  # noqa: E402

WIDTH, HEADS = 64, 4
RNG = np.random.default_rng(3)
X = RNG.standard_normal((2, 9, WIDTH)).astype(np.float32)
SQUARES = [RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(4)]


def plain(x: np.ndarray) -> np.ndarray:
    """What a step of either framework computes, in float64."""
    return cki.reference.fused_attention(
        cki.reference.softmax(x), *SQUARES, num_heads=HEADS, head_dim=WIDTH // HEADS
    )


def step(x: Any, squares: list[Any]) -> Any:
    return cki.fused_attention(cki.softmax(x), *squares, num_heads=HEADS, head_dim=WIDTH // HEADS)


def of_tensorflow() -> Callable[[int], None]:
    """One round in TensorFlow: on each device, of two sizes, eagerly and in a function of unknown sizes."""
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    devices = [device.name for device in gpus] or ["CPU:0"]
    first: dict[Any, bytes] = {}

    @tf.function(reduce_retracing=True)
    def function(x: Any, squares: list[Any]) -> Any:
        return step(x, squares) * 1.0

    def one_round(number: int) -> None:
        for device in devices:
            with tf.device(device):
                squares = [tf.constant(square) for square in SQUARES]
                for batch in (1, 2):
                    x = tf.constant(X[:batch])
                    for call in (step, function):
                        found = call(x, squares).numpy()
                        check(first, (device, batch), found, X[:batch])

    return one_round


def of_torch() -> Callable[[int], None]:
    """One round in torch, on the last device."""
    import torch

    place = last_device()
    first: dict[Any, bytes] = {}

    def one_round(number: int) -> None:
        squares = [torch.from_numpy(square).to(place) for square in SQUARES]
        for batch in (1, 2):
            found = step(torch.from_numpy(X[:batch]).to(place), squares)
            assert found.device.type == place.type and found.device.index == place.index
            check(first, batch, found.cpu().numpy(), X[:batch])

    return one_round


def of_a_model() -> Callable[[int], None]:
    """One round of a model with padding: logits of sdpa, and the same greedy text."""
    import torch
    import transformers

    from cki.adapters.transformers import register

    place = last_device()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(place).eval()
    ids = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1)).to(place)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    register()

    def one_round(number: int) -> None:
        found = {}
        with torch.inference_mode():
            for implementation in ("sdpa", "cki"):
                model.set_attn_implementation(implementation)
                logits = model(ids, attention_mask=mask).logits[mask.bool()]
                text = model.generate(
                    ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0
                )
                found[implementation] = logits.cpu(), text.cpu()
        torch.testing.assert_close(found["cki"][0], found["sdpa"][0], rtol=2e-3, atol=2e-3)
        assert torch.equal(found["cki"][1], found["sdpa"][1])
        gc.collect()
        if place.type == "cuda":
            assert torch.cuda.current_device() == 0
            torch.cuda.empty_cache()

    return one_round


def last_device() -> Any:
    import torch

    count = torch.cuda.device_count()
    return torch.device("cuda", count - 1) if count else torch.device("cpu")


def check(first: dict[Any, bytes], key: Any, found: np.ndarray, x: np.ndarray) -> None:
    if key not in first:
        wanted = plain(x)
        assert np.abs(found - wanted).max() <= 2e-2 * np.abs(wanted).max(), key
        first[key] = found.tobytes()
    assert found.tobytes() == first[key], key


def loaded_libraries() -> list[str]:
    """Files of NVIDIA's libraries in this process: two of one kind are a suspect where it faults."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        paths = {line.split()[-1] for line in file if "/" in line}
    return sorted(path for path in paths if re.search(r"lib(cu|nv|nccl)", os.path.basename(path)))


def main() -> None:
    faulthandler.dump_traceback_later(280, exit=True)  # before the test gives up waiting
    order, rounds = sys.argv[1], int(sys.argv[2])
    makers = [of_tensorflow, of_torch] if order == "tensorflow" else [of_torch, of_tensorflow]
    turns = []
    for make in makers:
        turns.append(make())
        turns[-1](0)
    turns.append(of_a_model())
    turns[2](0)
    print(*loaded_libraries(), sep="\n", file=sys.stderr)
    start, problems = threading.Barrier(len(turns)), []

    def drive(one_round: Callable[[int], None]) -> None:
        try:
            start.wait(120)
            for number in range(rounds):
                one_round(number)
        except BaseException as error:
            problems.append(repr(error))
            start.abort()

    threads = [threading.Thread(target=drive, args=(turn,)) for turn in turns[:2]]
    for thread in threads:
        thread.start()
    drive(turns[2])
    for thread in threads:
        thread.join()
    assert not problems, problems
    print("right")


if __name__ == "__main__":
    main()
