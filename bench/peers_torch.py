"""The encoder by PyTorch: SDPA in a CUDA graph, and torch.compile max-autotune in a CUDA graph.

Q, K and V come from one packed product, and nothing is left to the host: these are the strongest ways that stock torch
has.  Padding is a boolean mask.  On the CPU, where the tests run, a graph is the function itself.
"""

from __future__ import annotations

import fcntl
import functools
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bert_model
import numpy as np
from bert_model import Array, Model, Problem

Forward = Callable[[Any, Any], Any]
#: What is run in place of a function of the forward pass.
Translate = Callable[[Callable[..., Any]], Callable[..., Any]]


@functools.lru_cache(maxsize=2)
def device_weights(model: Model, device: str, dtype: Any) -> dict[str, Any]:
    """The weights on a device, with Q, K and V of a layer as one: "attention.self.qkv"."""
    import torch

    weights = {
        name: torch.from_numpy(value).to(device) for name, value in bert_model.state_dict(model).items()
    }
    weights = {name: value.to(dtype) for name, value in weights.items()}
    for number in range(model.layers):
        for part in ("weight", "bias"):
            prefix = f"encoder.layer.{number}.attention.self"
            packed = [weights.pop(f"{prefix}.{which}.{part}") for which in ("query", "key", "value")]
            weights[f"{prefix}.qkv.{part}"] = torch.cat(packed)
    return weights


def forward_pass(
    model: Model, pre_ln: bool, device: str, dtype: Any, translate: Translate = lambda function: function
) -> Forward:
    """`f(ids [batch, seq], mask)` -> [batch, seq, hidden] of dtype.  mask: bool [batch, 1, 1, seq] or None.

    translate: is given two functions, the embeddings and a layer, and returns what runs in their place.  All layers are
    one function of their weights, so that a compiler has to look at one.  In the pre-LN order a layer ends with the
    norm that the next begins with: what can be fused with one another lies in one function.
    """
    from torch.nn import functional

    weights = device_weights(model, device, dtype)
    heads, head_dim = model.heads, model.hidden // model.heads
    attention_norm, output_norm = "attention.output.LayerNorm", "output.LayerNorm"

    def named(prefix: str) -> dict[str, Any]:
        return {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}

    front = named("embeddings.")
    layers = [named(f"encoder.layer.{number}.") for number in range(model.layers)]
    #: Weight and bias of the norm that follows each layer, and of the first layer's.
    norms = [(layer[f"{attention_norm}.weight"], layer[f"{attention_norm}.bias"]) for layer in layers]
    norms.append((weights["LayerNorm.weight"], weights["LayerNorm.bias"]))

    def norm(x: Any, vectors: Any) -> Any:
        gamma, beta = vectors
        return functional.layer_norm(x, (model.hidden,), gamma, beta, bert_model.EPSILON)

    def vectors(layer: dict[str, Any], name: str) -> tuple[Any, Any]:
        return layer[f"{name}.weight"], layer[f"{name}.bias"]

    def attend(u: Any, layer: dict[str, Any], mask: Any) -> Any:
        batch, seq, hidden = u.shape
        qkv = functional.linear(u, *vectors(layer, "attention.self.qkv"))
        q, k, v = qkv.view(batch, seq, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        rows = context.transpose(1, 2).reshape(batch, seq, hidden)
        return functional.linear(rows, *vectors(layer, "attention.output.dense"))

    def feed(u: Any, layer: dict[str, Any]) -> Any:
        inner = functional.gelu(functional.linear(u, *vectors(layer, "intermediate.dense")))
        return functional.linear(inner, *vectors(layer, "output.dense"))

    def embed(ids: Any, front: dict[str, Any], first: Any) -> tuple[Any, ...]:
        x = functional.embedding(ids, front["word_embeddings.weight"])
        x = x + front["position_embeddings.weight"][: ids.shape[1]] + front["token_type_embeddings.weight"][0]
        x = norm(x, vectors(front, "LayerNorm"))
        return (x, norm(x, first)) if pre_ln else (x,)

    def pre_layer(x: Any, u: Any, layer: dict[str, Any], following: Any, mask: Any) -> tuple[Any, ...]:
        x = x + attend(u, layer, mask)
        x = x + feed(norm(x, vectors(layer, output_norm)), layer)
        return x, norm(x, following)

    def post_layer(x: Any, layer: dict[str, Any], following: Any, mask: Any) -> tuple[Any, ...]:
        x = norm(x + attend(x, layer, mask), vectors(layer, attention_norm))
        return (norm(x + feed(x, layer), vectors(layer, output_norm)),)

    embed_, layer_ = translate(embed), translate(pre_layer if pre_ln else post_layer)

    def run(ids: Any, mask: Any) -> Any:
        state = embed_(ids, front, norms[0])
        for layer, following in zip(layers, norms[1:]):
            state = layer_(*state, layer, following, mask)
        return state[-1]

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
        return kept(problem, forward(*inputs(model, problem, device)))


class Timer:
    """Times runs on torch's current stream, by events; on the CPU by the clock.  Runs once at first.

    A time is that of enough runs for 20 ms, so that the first one's launch does not count, and that the clocks of all
    that take turns are those of about as long a load: a GPU at its power limit lowers them over milliseconds.
    """

    sample_us = 20_000.0

    def __init__(self, run: Callable[[], object], device: str) -> None:
        self._run, self._device = run, device
        self._runs = 1
        run()
        if device == "cuda":
            self._runs = max(1, min(100, round(self.sample_us / max(self.elapsed_us(), 1.0))))

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
        import torch

        self._model, self._device = model, device
        self._replay: Replay | None = None
        self._timer: Timer | None = None
        device_weights(model, device, torch.float16)

    def prepare(self, problem: Problem) -> Array:
        import torch

        self._replay = self._timer = None  # frees the last one's memory
        forward = self.forward(problem)
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

    def forward(self, problem: Problem) -> Forward:
        """What is captured."""
        import torch

        return forward_pass(self._model, problem.pre_ln, self._device, torch.float16)


class Compiled(Sdpa):
    """torch.compile, max-autotune.  The graph is ours, so that its input is not copied before each replay.

    Problems that were prepared stay so: each has a graph of its own, and is asked for again without delay.
    """

    options: dict[str, Any] = {"mode": "max-autotune-no-cudagraphs"}  # noqa: RUF012

    def __init__(self, model: Model, device: str) -> None:
        super().__init__(model, device)
        self._ready: dict[Problem, tuple[Replay, Timer]] = {}
        self._tuning = Tuning() if device == "cuda" else None

    def prepare(self, problem: Problem) -> Array:
        import torch

        if problem not in self._ready:
            begin = time.monotonic()
            super().prepare(problem)
            assert self._replay is not None
            assert self._timer is not None
            self._ready[problem] = self._replay, self._timer
            if self._tuning is not None:
                print(
                    f"torch.compile, {problem}: {time.monotonic() - begin:.0f} s; {self._tuning}", flush=True
                )
        self._replay, self._timer = self._ready[problem]
        with torch.inference_mode():
            self._replay.run()
        return kept(problem, self._replay.output)

    def forward(self, problem: Problem) -> Forward:
        import torch

        torch._dynamo.reset()  # a problem's code is its own: nothing is made general in shape

        def translate(function: Callable[..., Any]) -> Callable[..., Any]:
            compiled: Callable[..., Any] = torch.compile(
                function, dynamic=False, fullgraph=True, **self.options
            )
            return compiled

        return forward_pass(self._model, problem.pre_ln, self._device, torch.float16, translate)


class CompiledWhole(Compiled):
    """All layers as one function, which takes minutes: to see that nothing is lost by compiling one."""

    def forward(self, problem: Problem) -> Forward:
        import torch

        torch._dynamo.reset()
        whole = forward_pass(self._model, problem.pre_ln, self._device, torch.float16)
        compiled: Forward = torch.compile(whole, dynamic=False, fullgraph=True, **self.options)
        return compiled


#: A file that the processes lock which compile at the same time.
_TURN = Path(tempfile.gettempdir()) / f"cki_bench_autotune_{os.getuid()}"


class Tuning:
    """What makes max-autotune cheaper and leaves its choices as they are, by Inductor's own means.

    - A candidate is compiled where it is timed, but in threads, before the first is timed.  Inductor's worker processes
      have compiled it before, in vain: they take the ptxas that comes with torch, its own process takes Triton's, and
      what one has compiled is nothing to the other.  Both take torch's here.
    - One process at a time times candidates, while others compile theirs.
    - Times go into the file of times of all processes, which Inductor writes as one of them knew it.

    compiling_s, first_s, waiting_s, timing_s: seconds of candidates' compilation, of their first calls, for a turn, and
    of the timing.
    """

    def __init__(self) -> None:
        from torch._inductor import codecache
        from torch._inductor.runtime import benchmarking, compile_tasks
        from torch._inductor.select_algorithm import AlgorithmSelectorCache

        self.compiling_s = self.first_s = self.waiting_s = self.timing_s = 0.0
        compile_tasks._set_triton_ptxas_path()
        benchmarker: Any = benchmarking.benchmarker
        self._benchmark_plain = benchmarker.benchmark_gpu
        benchmarker.benchmark_gpu = self._benchmark
        selector: Any = AlgorithmSelectorCache
        self._choose_plain = selector.benchmark_choices
        selector.benchmark_choices = self._choose
        cache: Any = codecache.CacheBase
        cache.update_local_cache = functools.partialmethod(_merge_times, cache.update_local_cache)

    def __str__(self) -> str:
        parts = self.compiling_s, self.first_s, self.waiting_s, self.timing_s
        return (
            "candidates compiled {:.0f} s, first calls {:.0f} s, for a turn {:.0f} s, timing {:.0f} s".format(
                *parts
            )
        )

    def _choose(self, choices: Any, *arguments: Any, **options: Any) -> Any:
        begin = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for choice in choices:
                if hasattr(choice, "precompile"):
                    pool.submit(choice.precompile)  # one that fails says so again when it is timed
        self.compiling_s += time.monotonic() - begin
        return self._choose_plain(choices, *arguments, **options)

    def _benchmark(self, candidate: Callable[[], object], *arguments: Any, **options: Any) -> Any:
        import torch

        begin = time.monotonic()
        try:
            candidate()
            torch.cuda.synchronize()
        finally:
            first = time.monotonic()
            self.first_s += first - begin
        with _TURN.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            turn = time.monotonic()
            self.waiting_s += turn - first
            try:
                return self._benchmark_plain(candidate, *arguments, **options)
            finally:
                self.timing_s += time.monotonic() - turn


def _merge_times(cache: Any, write: Callable[[Any, Any], None], times: Any) -> None:
    """Inductor's `update_local_cache`, with the times that other processes wrote meanwhile."""

    def merged(old: Any, new: Any) -> Any:
        if not (isinstance(old, dict) and isinstance(new, dict)):
            return new
        return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}

    with _TURN.with_suffix(".times").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write(cache, merged(cache.get_local_cache(), times))


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
