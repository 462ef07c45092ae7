"""The encoder by PyTorch: SDPA in a CUDA graph, and torch.compile max-autotune in a CUDA graph.

Q, K and V come from one packed product, and nothing is left to the host: these are the strongest ways that stock torch
has.  Padding is a boolean mask.  On the CPU, where the tests run, a graph is the function itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import bert_model
import numpy as np
from bert_model import Array, Model, Problem

Forward = Callable[[Any, Any], Any]


def forward_pass(model: Model, pre_ln: bool, device: str, dtype: Any) -> Forward:
    """`f(ids [batch, seq], mask)` -> [batch, seq, hidden] of dtype.  mask: bool [batch, 1, 1, seq] or None."""
    import torch
    from torch.nn import functional

    given = bert_model.state_dict(model)
    weights = {name: torch.from_numpy(value).to(device, dtype) for name, value in given.items()}
    heads, head_dim = model.heads, model.hidden // model.heads
    layers = [f"encoder.layer.{number}" for number in range(model.layers)]
    packed = {
        (layer, part): torch.cat(
            [weights.pop(f"{layer}.attention.self.{which}.{part}") for which in ("query", "key", "value")]
        )
        for layer in layers
        for part in ("weight", "bias")
    }
    table = weights["embeddings.position_embeddings.weight"]
    types = weights["embeddings.token_type_embeddings.weight"]
    words = weights["embeddings.word_embeddings.weight"]

    def norm(x: Any, name: str) -> Any:
        vectors = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return functional.layer_norm(x, (model.hidden,), *vectors, bert_model.EPSILON)

    def product(x: Any, name: str) -> Any:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def attend(u: Any, layer: str, mask: Any) -> Any:
        batch, seq, hidden = u.shape
        qkv = functional.linear(u, packed[layer, "weight"], packed[layer, "bias"])
        q, k, v = qkv.view(batch, seq, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return product(context.transpose(1, 2).reshape(batch, seq, hidden), f"{layer}.attention.output.dense")

    def feed(u: Any, layer: str) -> Any:
        inner = functional.gelu(product(u, f"{layer}.intermediate.dense"))
        return product(inner, f"{layer}.output.dense")

    def run(ids: Any, mask: Any) -> Any:
        x = functional.embedding(ids, words) + table[: ids.shape[1]] + types[0]
        x = norm(x, "embeddings.LayerNorm")
        for layer in layers:
            attention_norm, output_norm = f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"
            if pre_ln:
                x = x + attend(norm(x, attention_norm), layer, mask)
                x = x + feed(norm(x, output_norm), layer)
            else:
                x = norm(x + attend(x, layer, mask), attention_norm)
                x = norm(x + feed(x, layer), output_norm)
        return norm(x, "LayerNorm") if pre_ln else x

    return run


def inputs(model: Model, problem: Problem, device: str) -> tuple[Any, Any]:
    """(ids, mask) for `forward_pass`."""
    import torch

    ids = torch.from_numpy(bert_model.token_ids(model, problem)).to(device)
    if not problem.lengths:
        return ids, None
    return ids, torch.from_numpy(bert_model.kept_tokens(problem)).to(device)[:, None, None, :]


def kept(problem: Problem, output: Any) -> Array:
    """float32 [tokens, hidden] of [batch, seq, hidden]."""
    rows: Array = output.float().cpu().numpy()[bert_model.kept_tokens(problem)]
    return rows


def truth(model: Model, problem: Problem, device: str) -> Array:
    """The same from the same weights in float32 throughout."""
    import torch

    with torch.inference_mode():
        forward = forward_pass(model, problem.pre_ln, device, torch.float32)
        output = kept(problem, forward(*inputs(model, problem, device)))
    del forward
    if device == "cuda":
        torch.cuda.empty_cache()
    return output


class Timer:
    """Times runs on torch's current stream, by events; on the CPU by the clock.  Runs once at first.

    A time is that of enough runs for 5 ms, so that the first one's launch does not count.
    """

    def __init__(self, run: Callable[[], object], device: str) -> None:
        self._run, self._device = run, device
        self._runs = 1
        run()
        if device == "cuda":
            self._runs = max(1, min(50, round(5000 / max(self.elapsed_us(), 1.0))))

    def elapsed_us(self) -> float:
        """Microseconds of a run."""
        import torch

        if self._device == "cpu":
            begin = time.perf_counter()
            self._run()
            return (time.perf_counter() - begin) * 1e6
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(self._runs):
            self._run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3 / self._runs


class Replay:
    """A function without arguments as a CUDA graph.  output: what it returned, written anew by each run."""

    def __init__(self, function: Callable[[], Any], device: str) -> None:
        import torch

        self._function, self._graph = function, None
        if device == "cpu":
            self.output = function()
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, and lets libraries choose
                function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.output = function()

    def run(self) -> None:
        if self._graph is None:
            self.output = self._function()
        else:
            self._graph.replay()


class Sdpa:
    """scaled_dot_product_attention, linear, layer_norm and GELU, replayed from a CUDA graph."""

    def __init__(self, model: Model, device: str) -> None:
        self._model, self._device = model, device
        self._replay: Replay | None = None
        self._timer: Timer | None = None
        self._forward: tuple[bool, Forward] | None = None  # the norm order, and its function

    def prepare(self, problem: Problem) -> Array:
        import torch

        self._replay = self._timer = None  # frees the last one's memory
        if self._forward is None or self._forward[0] != problem.pre_ln:
            self._forward = None
            plain = forward_pass(self._model, problem.pre_ln, self._device, torch.float16)
            self._forward = problem.pre_ln, plain
        forward = self.translate(self._forward[1])
        ids, mask = inputs(self._model, problem, self._device)
        with torch.inference_mode():
            self._replay = Replay(lambda: forward(ids, mask), self._device)
            self._timer = Timer(self._replay.run, self._device)
        return kept(problem, self._replay.output)

    def elapsed_us(self) -> float:
        import torch

        assert self._timer is not None
        with torch.inference_mode():
            return self._timer.elapsed_us()

    def translate(self, forward: Forward) -> Forward:
        """What is captured."""
        return forward


class Compiled(Sdpa):
    """torch.compile, max-autotune.  The graph is ours, so that its input is not copied before each replay."""

    options: dict[str, str] = {"mode": "max-autotune-no-cudagraphs"}  # noqa: RUF012

    def translate(self, forward: Forward) -> Forward:
        import torch

        torch._dynamo.reset()  # a problem's code is its own: nothing is made general in shape
        compiled: Forward = torch.compile(forward, dynamic=False, fullgraph=True, **self.options)
        return compiled


class Gemm:
    """No encoder but the yardstick beside it: an fp16 product of large squares of random numbers (cuBLASLt)."""

    def __init__(self, model: Model, device: str) -> None:
        self._device = device
        self.size = 8192 if device == "cuda" else 64

    @property
    def flops(self) -> float:
        return 2.0 * self.size**3

    def prepare(self, problem: Problem) -> Array:
        import torch

        a, b = (torch.randn(self.size, self.size, device=self._device).half() for _ in range(2))
        out = torch.empty_like(a)
        self._timer = Timer(Replay(lambda: torch.mm(a, b, out=out), self._device).run, self._device)
        return np.zeros((0, 0), np.float32)

    def elapsed_us(self) -> float:
        return self._timer.elapsed_us()
