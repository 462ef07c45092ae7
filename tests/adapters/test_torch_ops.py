"""`torch.ops.cki.*`: every operator against torch's own checks, under torch.compile, torch.export and autograd."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch._dynamo  # noqa: E402, F811

import cki  # noqa: E402
from cki import own_operation  # noqa: E402
from cki.adapters.torch_ops import OPERATORS, schema  # noqa: E402
from cki.errors import CkiError, InvalidArgumentError, InvalidTypeError, UnsupportedError  # noqa: E402
from cki.ops.table import public_specs  # noqa: E402
from tests.adapters.programs import output_of  # noqa: E402

pytestmark = pytest.mark.torch
I32 = torch.int32


def normal(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


def cases():
    """An operator's arguments, by its name."""
    w, square = normal(64), normal(64, 64)
    lengths, table = torch.tensor([9, 3], dtype=I32), torch.tensor([[0, 1], [2, 3]], dtype=I32)
    cache, tokens = normal(4, 8, 2, 16), normal(3, 2, 16)
    block = {"num_heads": 4, "head_dim": 16}
    return {
        "layer_norm": ((normal(3, 64), w, w, normal(3, 64)), {}),
        "rms_norm": ((normal(3, 64), w), {"weight_offset": 1.0}),
        "layer_norm_quantize": ((normal(3, 64), w), {}),
        "rms_norm_quantize": ((normal(3, 64), w, normal(3, 64)), {}),
        "attention": ((normal(2, 5, 4, 16), normal(2, 5, 2, 16), normal(2, 5, 2, 16)), {"return_lse": True}),
        "varlen_attention": (
            (normal(9, 4, 16), normal(9, 2, 16), normal(9, 2, 16), torch.tensor([0, 4, 9], dtype=I32)),
            {"causal": True, "window": (3, -1)},
        ),
        "paged_attention": ((normal(2, 1, 4, 16), cache, cache.clone(), table, lengths), {}),
        "decode_attention": ((normal(2, 1, 4, 16), normal(2, 16, 2, 16), normal(2, 16, 2, 16), lengths), {}),
        "merge_states": ((normal(2, 3, 4, 16), normal(2, 3, 4)), {}),
        "append_kv": (
            (tokens, tokens, cache, cache.clone(), torch.tensor([0, 9, 31]), tokens, torch.tensor([0, 1, 2])),
            {"rope_base": 10000.0},
        ),
        "apply_rope": ((tokens, torch.tensor([0, 5, 9])), {}),
        "linear": ((normal(3, 64), normal(64, 32), normal(32)), {"activation": "gelu"}),
        "gated_linear": ((normal(3, 64), normal(64, 128)), {"activation": "silu"}),
        "fused_attention": ((normal(2, 5, 64), square, square, square, square), block),
        "fused_ffn": ((normal(2, 5, 64), normal(64, 128), normal(128, 64)), {"activation": "gelu"}),
        "encoder_layer": (
            (normal(2, 5, 64), square, square, square, square, normal(64, 128), normal(128, 64)),
            {**block, "activation": "gelu"},
        ),
        "encoder_layers": (
            (
                normal(2, 5, 64),
                normal(2, 64, 192),
                None,
                None,
                normal(2, 64, 64),
                normal(2, 64, 128),
                normal(2, 128, 64),
            ),
            {**block, "activation": "gelu"},
        ),
        "embed_tokens": ((torch.tensor([[1, 2, 3]]), normal(10, 64)), {}),
        "mean_pool": ((normal(2, 5, 64), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])), {}),
        "gated_activation": ((normal(3, 64),), {"activation": "silu"}),
        "bias_activation": ((normal(3, 64), w), {"activation": "gelu"}),
        "softmax": ((normal(3, 64),), {"scale": 0.5}),
        "quantize_fp8": ((normal(3, 64),), {}),
        "linear_fp8": (
            (
                torch.full((3, 128), 0x38, dtype=torch.uint8),
                torch.ones(3, 1),
                torch.full((16, 128), 0x30, dtype=torch.uint8),
                torch.ones(1, 1),
            ),
            {},
        ),  # codes of 1 and 0.5
        "dropout_add": ((normal(3, 64), normal(3, 64), torch.tensor([1]), torch.tensor([2])), {"p": 0.5}),
    }


def same(found, wanted):
    return len(found) == len(wanted) and all(
        a.dtype == b.dtype and torch.equal(a.float(), b.float()) for a, b in zip(found, wanted)
    )


def test_each_public_operation_has_an_operator_and_a_case():
    users = {spec.name for spec in own_operation.made}  # other tests of this process make some
    assert set(public_specs()) == set(OPERATORS) - users == set(cases())


def test_schemas():
    specs = public_specs()
    assert schema(specs["rms_norm"]) == (
        "rms_norm(Tensor x, Tensor? weight=None, Tensor? residual=None, *, float eps=1e-06, float weight_offset=0.0, "
        'str normalize="rounded") -> (Tensor, Tensor)'
    )
    assert "int num_heads, int head_dim, int? num_kv_heads=None" in schema(specs["fused_attention"])
    assert "Tensor(c!) k_cache, Tensor(d!) v_cache" in schema(specs["append_kv"])
    assert "Tensor(k!)? k_scale=None, Tensor(l!)? v_scale=None" in schema(specs["append_kv"])
    assert "Tensor? residual, Tensor seed" in schema(
        specs["dropout_add"]
    )  # no default before what is required


@pytest.mark.parametrize("name", sorted(public_specs()))
def test_opcheck(name):
    arguments, attributes = cases()[name]
    with cki.device("sim"):
        torch.library.opcheck(OPERATORS[name], arguments, attributes)


def eight_bit_caches():
    """Empty caches of codes, and a scale a token, which `append_kv` writes too."""
    return (*torch.zeros(2, 2, 4, 2, 16, dtype=torch.float8_e4m3fn), *torch.zeros(2, 2, 4, 2))


def test_scales_of_tokens_are_known_to_be_written(monkeypatch):
    """A schema cannot say that scales of heads are only read: they pass as well."""
    allclose = torch.allclose  # by which opcheck sees what was written; it knows no 8-bit floats
    monkeypatch.setattr(torch, "allclose", lambda a, b, **named: allclose(a.float(), b.float(), **named))
    k, slots = normal(3, 2, 16), torch.tensor([0, 1, 6])

    def model(k, k_cache, v_cache, k_scale, v_scale):
        before = k_scale.sum()
        cki.append_kv(k, 2 * k, (k_cache, v_cache, k_scale, v_scale), slots)
        return before, k_scale + v_scale

    with cki.device("sim"), torch.inference_mode():
        k_cache, v_cache, *of_tokens = eight_bit_caches()
        of_heads = torch.ones(2), torch.ones(2)
        for scales in (of_tokens, of_heads):
            arguments = (k, k, k_cache, v_cache, slots)
            named = {"k_scale": scales[0], "v_scale": scales[1]}
            torch.library.opcheck(
                OPERATORS["append_kv"], arguments, named, test_utils=("test_schema", "test_faketensor")
            )
        written, found = eight_bit_caches(), eight_bit_caches()
        wanted = model(k, *written)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert same(compiled(k, *found), wanted)
    assert wanted[0] == 0 and written[2].any()
    assert same(found, written)


def test_an_absent_output_is_an_empty_bool_tensor():
    with cki.device("sim"):
        out, total = torch.ops.cki.layer_norm(normal(3, 64))
        assert torch.equal(out, cki.layer_norm(normal(3, 64)))
    assert (total.dtype, total.numel()) == (torch.bool, 0)


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


def model_of_all(x, w, square, q, k, offsets, new, k_cache, v_cache, table, lengths, ids, slots, positions):
    """Public functions, as a user writes them."""
    results = [*cki.layer_norm(x, w, residual=x), *cki.rms_norm_quantize(x, w), cki.softmax(x, scale=0.5)]
    results += [*cki.attention(q, k, k, causal=True, return_lse=True, window=(3, -1))]
    results += [cki.varlen_attention(q[0], k[0], k[0], offsets, causal=True)]
    rotated = cki.append_kv(new, new, (k_cache, v_cache), slots, q=new, positions=positions)
    results += [rotated, cki.apply_rope(new, positions), k_cache.clone()]
    cki.append_kv(new, new, (k_cache, v_cache), slots + 1)
    results += [cki.paged_attention(q[:, :1], (k_cache, v_cache), table, lengths)]
    results += [cki.embed_tokens(ids, square)]
    block = q.reshape(2, 5, 64)
    results += [cki.fused_attention(block, square, square, square, square, num_heads=4, head_dim=16)]
    out = torch.empty_like(x)
    cki.linear(x, square, activation="silu", out=out)
    return [*results, out]


def test_public_functions_compile_to_one_graph():
    """Interop case torch_compile_opaque_op: with fullgraph=True."""

    def arguments():
        return (
            normal(3, 64), normal(64), normal(64, 64), normal(2, 5, 4, 16), normal(2, 5, 2, 16),
            torch.tensor([0, 2, 5], dtype=I32), normal(3, 2, 16), normal(4, 8, 2, 16), normal(4, 8, 2, 16),
            torch.tensor([[0, 1], [2, 3]], dtype=I32), torch.tensor([9, 3], dtype=I32), torch.tensor([[1, 2, 3]]),
            torch.tensor([0, 9, 30]), torch.tensor([0, 1, 2]),
        )  # fmt: skip

    with cki.device("sim"), torch.inference_mode():
        wanted = model_of_all(*arguments())
        found = torch.compile(model_of_all, fullgraph=True, backend="aot_eager")(*arguments())
    assert same(found, wanted)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma, self.weight = torch.nn.Parameter(normal(64)), torch.nn.Parameter(normal(64, 64))

    def forward(self, x):
        return cki.linear(cki.layer_norm(2 * x, self.gamma), self.weight, activation="silu") + 1


def test_inductor_with_a_dynamic_batch_compiles_once():
    """Interop case torch_compile_opaque_op: dynamic shapes."""
    block = Block()
    with cki.device("sim"), torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, dynamic=True)
        compiled(normal(4, 64))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for batch in (4, 9, 3):
            assert torch.allclose(compiled(normal(batch, 64)), block(normal(batch, 64)), rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_batch(strict):
    block, batch = Block(), torch.export.Dim("batch", min=1)
    with cki.device("sim"), torch.no_grad():
        program = torch.export.export(block, (normal(4, 64),), dynamic_shapes=({0: batch},), strict=strict)
        assert torch.equal(program.module()(normal(9, 64)), block(normal(9, 64)))
    targets = {node.target for node in program.graph.nodes}
    assert {OPERATORS["layer_norm"], OPERATORS["linear"]} <= targets


class Constants(torch.nn.Module):
    """Tensors that are neither parameters nor buffers, beside what is traced and alone."""

    def __init__(self):
        super().__init__()
        self.rows, self.weight = normal(3, 64), normal(64, 64)

    def forward(self, x):
        return (
            cki.layer_norm(self.rows),
            cki.linear(x, self.weight),
            cki.linear(self.rows, x.mT, self.weight[0, :4]),
        )


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_calls_with_constants(strict):
    module, x = Constants(), normal(4, 64)
    with cki.device("sim"), torch.no_grad():
        program = torch.export.export(module, (x,), strict=strict)
        for found, expected in zip(program.module()(2 * x), module(2 * x), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("earlier_calls", [0, 3])
def test_modes_that_trace_see_calls_of_tensors_with_data(earlier_calls):
    """An output without data was written through an address that it does not have; make_fx recorded its allocation."""
    x = normal(5, 32 + 16 * earlier_calls)
    with cki.device("sim"), torch.no_grad():
        for _ in range(earlier_calls):  # after two calls a problem has a function of its own
            cki.softmax(x)
        graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: cki.softmax(x) + 1)(x)
        assert OPERATORS["softmax"] in {node.target for node in graph.graph.nodes}
        assert torch.equal(graph(2 * x), cki.softmax(2 * x) + 1)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert type(cki.softmax(x)) is type(cki.softmax(mode.from_tensor(x))) is type(mode.from_tensor(x))
        with pytest.raises(InvalidTypeError, match="tensors with data beside one of a trace"):
            cki.layer_norm(x, mode.from_tensor(x[0]))
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            assert torch.allclose(cki.softmax(x), torch.softmax(x, -1))  # counts, and traces nothing


@pytest.mark.parametrize("operation", ["apply_rope", "paged_attention"])
def test_values_are_looked_at_between_two_graphs(monkeypatch, operation):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    x, heads, cache = normal(2, 2, 16), normal(2, 1, 2, 16), normal(4, 8, 2, 16)
    model, arguments, message = {
        "apply_rope": (lambda x, p, c: cki.apply_rope(2 * x, p, cos_sin=c), (x, torch.tensor([0, 7]), normal(7, 16)),
                       "positions holds 7"),
        "paged_attention": (lambda q, s, c: cki.paged_attention(2 * q, (c, c), s[None].mT.contiguous(), s),
                            (heads, torch.tensor([3, 9]), cache), "seq_lens.1. is 9"),
    }[operation]  # fmt: skip
    torch._dynamo.reset()
    with cki.device("sim"), torch.inference_mode():
        with pytest.raises(InvalidArgumentError, match=message):
            torch.compile(model, backend="eager")(*arguments)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="CKI_VALIDATE=1 reads values"):
            torch.compile(model, backend="eager", fullgraph=True)(*arguments)
    with (
        torch._subclasses.FakeTensorMode() as mode,
        pytest.raises(UnsupportedError, match="CKI_VALIDATE=1 reads"),
    ):
        model(*map(mode.from_tensor, arguments))


def test_the_first_traced_call_loads_the_operators():
    """A program that names no adapter compiles: nothing was registered before."""
    program = (
        "import sys, torch, cki\n"
        "f = torch.compile(lambda x: cki.softmax(x) + 1, fullgraph=True, backend='eager')\n"
        "with cki.device('sim'):\n"
        "    assert 'cki.adapters.torch_ops' not in sys.modules\n"
        "    y = f(torch.zeros(2, 4))\n"
        "assert torch.equal(y, torch.full((2, 4), 1.25)), y\n"
    )
    output_of(program)


# ---------------------------------------------------------------------------------------------------------------------
# refusals


def test_gradients_are_refused_by_name():
    weight = torch.nn.Parameter(normal(64))
    with cki.device("sim"):
        with pytest.raises(InvalidTypeError, match=r"^layer_norm: .*\n.*weight requires grad.*\n.*no_grad"):
            torch.ops.cki.layer_norm(normal(3, 64), weight)
        with torch.no_grad():
            torch.ops.cki.layer_norm(normal(3, 64), weight)
        compiled = torch.compile(lambda x: cki.layer_norm(x, weight), backend="eager")
        with pytest.raises(Exception, match="layer_norm: unusable tensors.*weight requires grad"):
            compiled(normal(3, 64))


def test_a_wrong_call_is_refused_while_it_is_traced():
    compiled = torch.compile(lambda x, w: cki.layer_norm(x, w), fullgraph=True, backend="eager")
    with cki.device("sim"), pytest.raises(Exception, match="layer_norm: invalid arguments.*weight"):
        compiled(normal(3, 64), normal(63))
    with torch._subclasses.FakeTensorMode() as mode:
        x, w = mode.from_tensor(normal(3, 64)), mode.from_tensor(normal(63))
        assert cki.layer_norm(x).shape == (3, 64)
        with pytest.raises(InvalidArgumentError, match="weight"):
            cki.layer_norm(x, w)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.zeros(2, 8, dtype=torch.float16), InvalidTypeError, "out is f16\n  hint: out of dtype f32"),
        (
            torch.zeros(3, 2, 8),
            InvalidArgumentError,
            r"out has shape \(3, 2, 8\)\n  hint: out of shape \(2, 8\)",
        ),
    ],
)
def test_an_out_that_a_copy_would_convert_or_broadcast_to_is_refused(out, error, message):
    def model(x, out):
        return cki.softmax(x, out=out)

    torch._dynamo.reset()
    with cki.device("sim"):
        with pytest.raises(error, match=message):
            torch.compile(model, backend="eager")(torch.ones(2, 8), out)
        assert not out.any()
        torch._dynamo.reset()
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match="one whose out= is of another shape or dtype"
        ):
            torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 8), out)


def test_append_kv_refuses_its_out_before_it_writes_the_caches():
    def model(k, q, caches, slots, q_out):
        return cki.append_kv(k, k, caches, slots, q=q, positions=slots, q_out=q_out)

    k, slots = torch.ones(2, 1, 8), torch.tensor([3, 5])
    with cki.device("sim"):
        for q_out in (torch.zeros(2, 1, 8, dtype=torch.float16), torch.zeros(3, 1, 8)):
            torch._dynamo.reset()
            caches = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
            with pytest.raises(CkiError, match="out"):
                torch.compile(model, backend="eager")(k, k, caches, slots, q_out)
            assert not any(cache.any() for cache in caches)
        torch._dynamo.reset()
        q_out = torch.zeros(2, 1, 8)
        torch.compile(model, backend="eager", fullgraph=True)(k, k, caches, slots, q_out)
        assert q_out.any() and caches[0].any()


def test_a_call_with_a_stream_stands_between_two_graphs():
    def model(x):
        return cki.layer_norm(2 * x, stream=0) + 1

    x = normal(3, 64)
    with cki.device("sim"):
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(x), model(x))
        torch._dynamo.reset()
        with pytest.raises(Exception, match="a call with stream=, of cki.Encoder, or without"):
            torch.compile(model, fullgraph=True, backend="eager")(x)
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(UnsupportedError, match="with stream="):
        model(mode.from_tensor(x))


def test_a_call_between_two_graphs_is_not_traced():
    """Dynamo warns of what it meets in there, and it takes time."""
    traced = []

    def backend(graph, _):
        traced.append(graph)
        return graph

    def model(x):
        return cki.layer_norm(2 * x, stream=0) + 1

    x = normal(3, 66)
    torch._dynamo.reset()
    with cki.device("sim"), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        expected = model(x)  # the next call gets the problem's generated function
        assert torch.equal(torch.compile(model, backend=backend)(x), expected)
    assert len(traced) == 2  # before and after


def test_other_frameworks_arrays_stand_between_two_graphs():
    array = np.ones((3, 64), np.float32)

    def model(x):
        return cki.layer_norm(x) + float(cki.softmax(array).sum())

    with cki.device("sim"):
        assert torch.equal(torch.compile(model, backend="eager")(normal(3, 64)), model(normal(3, 64)))


@pytest.mark.gpu
def test_cuda_graph_trees():
    block = Block().cuda()
    with torch.inference_mode():
        compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            x = normal(16, 64).cuda()
            assert torch.allclose(compiled(x), block(x), rtol=1e-4, atol=1e-4)
