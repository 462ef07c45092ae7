"""`scaled_dot_product_attention` against torch's own: layouts, masks, causal, grouped heads, refusals."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

import cki  # noqa: E402
from cki.adapters.torch import scaled_dot_product_attention  # noqa: E402
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError  # noqa: E402

pytestmark = pytest.mark.torch
PLACES = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def place(request):
    """Where tensors lie; calls in the test run there."""
    with cki.device(request.param):
        yield "cpu" if request.param == "sim" else "cuda"


def normal(*shape, place="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(place, dtype)


def compare(q, k, v, **options):
    found = scaled_dot_product_attention(q, k, v, **options)
    wide = {
        n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for n, t in options.items()
    }
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **wide)
    assert found.shape == wanted.shape
    assert found.dtype == q.dtype
    if not found.numel():
        return
    # Twice what torch's own rounding of the same inputs costs, as for all kernels.
    own = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    bound = 2 * (own - wanted).abs().max() + 1e-5 * wanted.abs().max()
    assert (found - wanted).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_plain_and_causal(place, dtype, is_causal):
    q, k = normal(2, 4, 33, 32, place=place, dtype=dtype), normal(2, 4, 33, 32, place=place, dtype=dtype)
    compare(q, k, k.flip(2), is_causal=is_causal)


@pytest.mark.parametrize(("queries", "keys"), [(5, 40), (40, 5)])
def test_causal_is_top_left(place, queries, keys):
    q, k = normal(1, 2, queries, 16, place=place), normal(1, 2, keys, 16, place=place)
    compare(q, k, k, is_causal=True)


def test_scale_and_another_value_dim(place):
    q, k, v = (
        normal(2, 3, 7, 16, place=place),
        normal(2, 3, 9, 16, place=place),
        normal(2, 3, 9, 24, place=place),
    )
    compare(q, k, v, scale=0.3)


@pytest.mark.parametrize("shape", [(2, 4, 6, 9), (2, 1, 6, 9), (1, 1, 6, 9), (4, 6, 9), (6, 9), (1, 9)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast(place, shape, kind):
    q, k = normal(2, 4, 6, 16, place=place), normal(2, 4, 9, 16, place=place)
    mask = normal(*shape, place=place)
    compare(q, k, k, attn_mask=mask > -0.5 if kind == "bool" else mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_and_is_causal_hide_together(place, kind):
    """As in torch from 2.13 on; earlier ones refuse it."""
    q, k = normal(2, 4, 6, 16, place=place), normal(2, 4, 9, 16, place=place)
    mask = normal(6, 9, place=place)
    mask = mask > -0.5 if kind == "bool" else mask
    before = torch.ones(6, 9, dtype=torch.bool, device=q.device).tril()
    both = mask & before if kind == "bool" else mask.masked_fill(~before, -torch.inf)
    found = scaled_dot_product_attention(q, k, k, attn_mask=mask, is_causal=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=both)
    seen = both.any(-1) if kind == "bool" else torch.ones(6, dtype=torch.bool)
    torch.testing.assert_close(found[..., seen, :], wanted[..., seen, :], atol=1e-5, rtol=1e-5)
    assert not found[..., ~seen, :].any()


def test_grouped_heads(place):
    q, k = normal(2, 8, 5, 16, place=place), normal(2, 2, 5, 16, place=place)
    compare(q, k, k, enable_gqa=True, is_causal=True)


def test_no_and_several_batch_axes(place):
    q, k = normal(4, 5, 16, place=place), normal(4, 7, 16, place=place)
    compare(q, k, k)
    q, k = normal(2, 3, 4, 5, 16, place=place), normal(2, 3, 4, 7, 16, place=place)
    compare(q, k, k, attn_mask=normal(3, 1, 5, 7, place=place) > 0)
    compare(q, k, k, attn_mask=normal(2, 3, 4, 5, 7, place=place))


@pytest.mark.parametrize("mask", [None, (5, 7), (1, 7), (7,)])
def test_two_axes_are_one_head(place, mask):
    q, k, v = normal(5, 16, place=place), normal(7, 16, place=place), normal(7, 24, place=place)
    compare(q, k, v, is_causal=mask is None)
    compare(q, k, v, attn_mask=None if mask is None else normal(*mask, place=place))


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((), (2,), (2,)), ((2,), (), ()), ((2, 3), (3,), (3,)), ((3,), (2, 3), (2, 3)), ((2, 3), (), (3,)),
        ((2, 3), (1, 3), (1, 3)), ((1, 3), (2, 3), (2, 3)), ((1, 3), (1, 3), (2, 3)),  # batches of one
        ((2, 3), (2, 1), (2, 1)), ((2, 1), (2, 3), (2, 3)), ((2, 3), (2, 1), (1, 3)), ((1, 1), (2, 1), (2, 3)),
        ((2, 1, 3), (1, 4, 3), (2, 4, 3)), ((2, 1, 3), (1, 1, 3), (2, 4, 1)), ((4, 1, 1, 3), (2, 1, 1), (3,)),
        ((0, 3), (1, 3), (3,)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("masked", [False, True])
def test_leading_axes_broadcast(place, query, key, value, masked):
    shape = torch.broadcast_shapes(query, key)
    q, k = normal(*query, 5, 16, place=place), normal(*key, 7, 16, place=place)
    mask = normal(*shape, 5, 7, place=place) > -0.8 if masked else None
    compare(q, k, normal(*value, 7, 16, place=place), attn_mask=mask)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((8,), (2,), (2,)), ((2, 8), (1, 2), (2,)), ((2, 8), (2, 1), (2, 1)), ((2, 8), (2, 2), (2, 4)),
        ((3, 1, 8), (2, 4), (2, 4)), ((2, 8), (1,), (8,)),
    ],
)  # fmt: skip
def test_leading_axes_of_grouped_heads_broadcast(place, query, key, value):
    q, k = normal(*query, 5, 16, place=place), normal(*key, 7, 16, place=place)
    compare(q, k, normal(*value, 7, 16, place=place), enable_gqa=True)


def test_views_are_read_in_place(place):
    """As models make them: [batch, length, heads, dim] with two axes exchanged.  The output is laid out so too."""
    q = normal(2, 5, 4, 16, place=place).transpose(1, 2)
    compare(q, q, q)
    assert scaled_dot_product_attention(q, q, q).transpose(1, 2).is_contiguous()


def test_a_query_without_keys_gets_zero(place):
    q = normal(1, 1, 3, 16, place=place)
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, True]], device=place)
    assert not scaled_dot_product_attention(q, q, q, attn_mask=mask)[0, 0, 1].any()


def test_compiles_to_one_graph(place):
    def model(q, k, mask):
        return scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True) * 2

    q, k, mask = (
        normal(2, 4, 6, 16, place=place),
        normal(2, 2, 9, 16, place=place),
        normal(6, 9, place=place) > 0,
    )
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, mask)
    assert torch.equal(found, model(q, k, mask))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_gradient_where_it_is_asked_for(is_compiled):
    q, k, v = (normal(*shape).requires_grad_() for shape in ((2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16)))
    bias = normal(5, 7).requires_grad_()

    def ours(q, k, v, bias):
        return scaled_dot_product_attention(q, k, v, bias, enable_gqa=True, recompute_gradient=True)

    if is_compiled:
        ours = torch.compile(ours, fullgraph=True, backend="aot_eager")
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    with cki.device("sim"):
        found = ours(q, k, v, bias)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        gradients = torch.autograd.grad(found.sin().sum(), (q, k, v, bias))
    for given, expected in zip(gradients, torch.autograd.grad(wanted.sin().sum(), (q, k, v, bias))):
        torch.testing.assert_close(given, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_gradient_of_what_is_broadcast(is_compiled):
    q, k, v = (normal(*shape).requires_grad_() for shape in ((2, 1, 4, 5, 16), (3, 1, 7, 16), (7, 16)))

    def ours(q, k, v):
        return scaled_dot_product_attention(q, k, v, recompute_gradient=True)

    if is_compiled:
        ours = torch.compile(ours, fullgraph=True, backend="aot_eager")
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    with cki.device("sim"):
        found = ours(q, k, v)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        gradients = torch.autograd.grad(found.sin().sum(), (q, k, v))
    for given, expected in zip(gradients, torch.autograd.grad(wanted.sin().sum(), (q, k, v))):
        torch.testing.assert_close(given, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_torch_s(place, dtype):
    """Its type for all, whichever they come in, traced too."""
    q, k = normal(2, 4, 9, 16, place=place), normal(2, 4, 9, 16, place=place)
    mask = normal(9, 9, place=place)
    traced = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    with torch.autocast(place, dtype):
        for tensors in ((q, k, k), (q, k, k.to(dtype)), (q.to(torch.bfloat16), k, k)):
            wanted = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask)
            for call in (scaled_dot_product_attention, traced):
                found = call(*tensors, attn_mask=mask)
                assert found.dtype == wanted.dtype == dtype
                torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    assert scaled_dot_product_attention(q, k, k).dtype == torch.float32


def test_refusals():
    q, k = normal(2, 4, 6, 16), normal(2, 2, 6, 16)
    with pytest.raises(UnsupportedError, match=r"dropout_p is 0\.1"):
        scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    with pytest.raises(InvalidArgumentError, match="have 4, 2 and 2 heads, but enable_gqa is False"):
        scaled_dot_product_attention(q, k, k)
    with pytest.raises(InvalidArgumentError, match="have 1, 4 and 4 axes, not 2 or more"):
        scaled_dot_product_attention(q[0, 0, 0], q, q)
    with pytest.raises(InvalidArgumentError, match="have 4, 2 and 4 axes, not 3 or more"):
        scaled_dot_product_attention(q, k[0, 0], q, enable_gqa=True)
    with pytest.raises(InvalidArgumentError, match="query has 4 heads, which is no multiple of value's 3"):
        scaled_dot_product_attention(q, k, normal(2, 3, 6, 16), enable_gqa=True)
    with pytest.raises(InvalidTypeError, match="value must be of torch"):
        scaled_dot_product_attention(q, q, q.numpy())
    with (
        cki.device("sim"),
        pytest.raises(
            InvalidTypeError, match="^scaled_dot_product_attention: unusable tensors\n  - query requires grad"
        ),
    ):
        scaled_dot_product_attention(q.requires_grad_(), q, q)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dropout_p": torch.tensor([0.0, 0.0])}, UnsupportedError, "dropout_p is tensor"),
        ({"is_causal": 1}, InvalidTypeError, "is_causal is 1 of type int"),
        ({"recompute_gradient": "yes"}, InvalidTypeError, "recompute_gradient is 'yes'\n  hint: recompute_gradient of"),
        ({"enable_gqa": "yes"}, InvalidTypeError, "enable_gqa is 'yes'\n  hint: enable_gqa of True or False"),
        ({"attn_mask": torch.ones(6, 7, dtype=torch.int32)}, InvalidTypeError, "attn_mask is torch.int32\n  hint: "),
        ({"attn_mask": torch.ones(5, 7)}, InvalidArgumentError, "(5, 7), which does not broadcast to (2, 3, 4, 6, 7)"),
        ({"attn_mask": torch.ones(5, 1, 6, 7)}, InvalidArgumentError, "(5, 1, 6, 7), which does not broadcast to"),
        ({"attn_mask": torch.ones(1, 2, 3, 4, 6, 7)}, InvalidArgumentError, "(1, 2, 3, 4, 6, 7), which does not"),
        ({"key": normal(2, 3, 4, 7, 24)}, InvalidArgumentError, "query has head_dim 16, key has head_dim 24\n  hint"),
        ({"value": normal(2, 3, 4, 8, 16)}, InvalidArgumentError, "key has 7 keys, value has 8"),
        ({"value": normal(2, 3, 4, 7, 16).half()}, InvalidTypeError, "value has dtype f16"),
        # As many sequences, in another order: they must not be taken for each other's.
        ({"key": normal(3, 2, 4, 7, 16)}, InvalidArgumentError, "axes (2, 3), (3, 2) and (2, 3), which do not"),
        ({"value": normal(6, 1, 4, 7, 16)}, InvalidArgumentError, "axes (2, 3), (2, 3) and (6, 1), which do not"),
    ],
)  # fmt: skip
def test_what_torch_would_broadcast_or_take(changes, error, message):
    tensors = {
        "query": normal(2, 3, 4, 6, 16),
        "key": normal(2, 3, 4, 7, 16),
        "value": normal(2, 3, 4, 7, 16),
    }
    with cki.device("sim"), pytest.raises(error, match=re.escape(message)):
        scaled_dot_product_attention(**{**tensors, **changes})
