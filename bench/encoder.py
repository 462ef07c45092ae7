"""Stacks of `cki.encoder_layer` against PyTorch's fused attention and GEMMs, in the same run; any type, small models.

    python bench/encoder.py                                 # BERT-large and all-MiniLM-L6-v2, usual lengths
    python bench/encoder.py --model bert-large --seq-len 2048 --batch 4 --post-ln

torch is one packed QKV product, `scaled_dot_product_attention`, `linear`, `layer_norm` and GELU, replayed from a CUDA
graph as ours is (`bert_large.py` measures `cki.Encoder`, against more).  `vs_torch` is torch's time over ours,
tokens_per_s counts all tokens of the batch, launches_per_layer our kernels.  Before timing, one layer is compared with
the same layer in float64 on the GPU: its largest error may be twice that of torch in the same type, plus 1e-5 of the
largest value; one that is wrong ends the program.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import common

import cki
from cki.device import cuda_device
from cki.dtypes import from_name
from cki.operand import dense
from cki.ops.encoder import ENCODER_LAYER
from cki.ops.spec import Problem

TORCH = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


class Model(NamedTuple):
    """Sizes of an encoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    inner: int


MODELS = {
    "bert-large": Model("bert-large", 24, 1024, 16, 4096),
    "minilm": Model("all-MiniLM-L6-v2", 6, 384, 12, 1536),
}
#: (model, batch, sequence length)
PROBLEMS = (
    ("bert-large", 4, 128), ("bert-large", 4, 512), ("bert-large", 4, 1024), ("bert-large", 4, 2048),
    ("minilm", 1, 16), ("minilm", 6, 16), ("minilm", 32, 128),
)  # fmt: skip


def make_layer(model: Model, dtype: Any, seed: int) -> dict[str, Any]:
    """Random weights [in, out] and vectors, named as in `cki.encoder_layer`."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    h, inner = model.hidden, model.inner

    def normal(*shape: int, scale: float) -> Any:
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)

    matrices = {"wq": (h, h), "wk": (h, h), "wv": (h, h), "wo": (h, h), "w1": (h, inner), "w2": (inner, h)}
    vectors = {
        "bq": h,
        "bk": h,
        "bv": h,
        "bo": h,
        "b1": inner,
        "b2": h,
        "attention_beta": h,
        "output_beta": h,
    }
    layer = {name: normal(*shape, scale=shape[0] ** -0.5) for name, shape in matrices.items()}
    layer |= {name: normal(width, scale=0.1) for name, width in vectors.items()}
    layer |= {name: 1 + normal(h, scale=0.1) for name in ("attention_gamma", "output_gamma")}
    return layer


def torch_layer(model: Model, layer: dict[str, Any], pre_ln: bool) -> Callable[[Any], Any]:
    """The layer by PyTorch, Q, K and V from one packed product, weights stored as `nn.Linear` does."""
    import torch
    from torch.nn import functional

    packed = torch.cat([layer["wq"], layer["wk"], layer["wv"]], 1).T.contiguous()
    packed_bias = torch.cat([layer["bq"], layer["bk"], layer["bv"]])
    wo, w1, w2 = (layer[name].T.contiguous() for name in ("wo", "w1", "w2"))

    def norm(x: Any, which: str) -> Any:
        return functional.layer_norm(
            x, (model.hidden,), layer[f"{which}_gamma"], layer[f"{which}_beta"], 1e-5
        )

    def attend(u: Any) -> Any:
        batch, seq, hidden = u.shape
        qkv = functional.linear(u, packed, packed_bias).view(
            batch, seq, 3, model.heads, hidden // model.heads
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(q, k, v)
        return functional.linear(context.transpose(1, 2).reshape(batch, seq, hidden), wo, layer["bo"])

    def feed(u: Any) -> Any:
        return functional.linear(functional.gelu(functional.linear(u, w1, layer["b1"])), w2, layer["b2"])

    def run(x: Any) -> Any:
        if pre_ln:
            x = x + attend(norm(x, "attention"))
            return x + feed(norm(x, "output"))
        x = norm(x + attend(x), "attention")
        return norm(x + feed(x), "output")

    return run


def cki_layer(model: Model, layer: dict[str, Any], pre_ln: bool) -> Callable[[Any], Any]:
    """The layer by CKI, from the same weights as torch's: one for Q, K and V, all stored [out, in]."""
    import torch

    arguments: dict[str, Any] = dict(layer)
    q_k_v = [[arguments.pop(letter + part) for part in "qkv"] for letter in "wb"]
    arguments |= {"wq": torch.cat(q_k_v[0], 1), "bq": torch.cat(q_k_v[1])}
    arguments |= {name: arguments[name].T.contiguous() for name in ("wq", "wo", "w1", "w2")}
    heads = {"num_heads": model.heads, "head_dim": model.hidden // model.heads}
    arguments |= {"wk": None, "wv": None, "weight_layout": "out_in", "pre_ln": pre_ln, **heads}
    return lambda x: cki.encoder_layer(x, **arguments)


def check(model: Model, layer: dict[str, Any], x: Any, pre_ln: bool) -> tuple[float, float]:
    """Largest errors of our layer and of torch's, relative to the largest value.  Ends when ours is too large."""
    double = {name: value.double() for name, value in layer.items()}
    truth = torch_layer(model, double, pre_ln)(x.double())
    scale = float(truth.abs().max())
    ours = float((cki_layer(model, layer, pre_ln)(x).double() - truth).abs().max()) / scale
    theirs = float((torch_layer(model, layer, pre_ln)(x).double() - truth).abs().max()) / scale
    if not ours <= 2 * theirs + 1e-5:
        raise SystemExit(f"{model.name} {tuple(x.shape)}: error {ours:.2e}, torch's is {theirs:.2e}")
    return ours, theirs


def launches(model: Model, batch: int, seq: int, dtype: str, pre_ln: bool) -> int:
    """Kernels of a layer, from its plan."""
    h, element = model.hidden, from_name(dtype)
    shapes = {
        "x": (batch, seq, h),
        "wq": (3 * h, h),
        "wo": (h, h),
        "w1": (model.inner, h),
        "w2": (h, model.inner),
    }
    shapes |= {"bq": (3 * h,), "bo": (h,), "b1": (model.inner,), "b2": (h,)}
    shapes |= {f"{which}_{part}": (h,) for which in ("attention", "output") for part in ("gamma", "beta")}
    attributes = {attribute.name: attribute.default for attribute in ENCODER_LAYER.attributes}
    attributes |= {
        "num_heads": model.heads, "head_dim": h // model.heads, "pre_ln": pre_ln, "activation": "gelu",
        "weight_layout": "out_in",
    }  # fmt: skip
    problem = Problem({name: dense(name, shape, element) for name, shape in shapes.items()}, attributes)
    return len(
        ENCODER_LAYER.plan(problem, {"out": dense("out", (batch, seq, h), element)}, cuda_device(0)).steps
    )


def flops(model: Model, batch: int, seq: int) -> float:
    """Multiply-adds, times two, of all layers."""
    products = 4 * model.hidden**2 + 2 * model.hidden * model.inner + 2 * seq * model.hidden
    return 2.0 * batch * seq * products * model.layers


def measure(model: Model, batch: int, seq: int, dtype: str, pre_ln: bool) -> list[dict[str, object]]:
    """Two rows: torch and CKI."""
    import torch

    torch_dtype = getattr(torch, TORCH[dtype])
    layers = [make_layer(model, torch_dtype, seed) for seed in range(model.layers)]
    x = torch.randn(batch, seq, model.hidden, device="cuda").to(torch_dtype)
    ours, theirs = check(model, layers[0], x, pre_ln)
    rows, torch_us = [], math.nan
    for name, make, error in (("torch", torch_layer, theirs), ("cki", cki_layer, ours)):
        stack = [make(model, layer, pre_ln) for layer in layers]

        def forward(y: Any, stack: list[Callable[[Any], Any]] = stack) -> Any:
            for run in stack:
                y = run(y)
            return y

        timing = common.graph_time(forward, [(x,)], framework="torch", calls=1)
        torch_us = timing.median_us if name == "torch" else torch_us
        rows.append(common.row(
            "encoder", f"{model.name} batch={batch} seq={seq} {'pre' if pre_ln else 'post'}-LN", dtype, name, timing,
            flops=flops(model, batch, seq), vs_torch=round(torch_us / timing.median_us, 3),
            tokens_per_s=round(batch * seq / timing.median_us * 1e6), error=f"{error:.1e}",
            launches_per_layer=launches(model, batch, seq, dtype, pre_ln) if name == "cki" else "",
        ))  # fmt: skip
    return rows


def main() -> None:
    """Measures and writes encoder.csv."""
    parser = argparse.ArgumentParser(description="time of whole encoders")
    parser.add_argument(
        "--model", choices=sorted(MODELS), help="with --batch and --seq-len: this problem alone"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument(
        "--dtype", choices=sorted(TORCH), action="append", help="may be repeated; default f16"
    )
    parser.add_argument("--post-ln", action="store_true", help="BERT's norm order; MiniLM always has it")
    arguments = parser.parse_args()
    common.require_gpu()
    import torch

    problems = [(arguments.model, arguments.batch, arguments.seq_len)] if arguments.model else PROBLEMS
    rows = []
    with torch.inference_mode():
        for dtype in arguments.dtype or ["f16"]:
            for name, batch, seq in problems:
                pre_ln = not arguments.post_ln and name != "minilm"
                rows += measure(MODELS[name], batch, seq, dtype, pre_ln)
    common.write_csv("encoder", rows)


if __name__ == "__main__":
    main()
