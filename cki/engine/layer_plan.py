"""One layer of a step: its launches, over a step's buffers.

Decode steps of up to 64 sequences are five launches a layer that hand each other rows (`few_rows`) where these can,
or six where heads are not of 128: over e4m3 codes (of up to 32 two parts of the activations, W8A16, of more one,
W8A8), and of more than 8 in bf16.  All others are as `Products` launches them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cki import dtypes
from cki.device import DeviceInfo
from cki.engine.products import DECODE_TOKENS, Products, Stream, Weight
from cki.heuristics.linear import ACTIVATIONS
from cki.operand import Operand, dense
from cki.ops.attention import PackedSequences, plan_attention
from cki.ops.embedding import plan_embed_tokens
from cki.ops.few_rows import ROWS, Heads, Rows, plan_embed_stream, plan_few_rows
from cki.ops.gather_cache import plan_gather_cache
from cki.ops.linear_decode import Norm
from cki.ops.paged import plan_paged_attention
from cki.ops.rope import Rotation, plan_append_kv
from cki.plan import Plan, Step

if TYPE_CHECKING:
    from cki.engine.step_plan import DecoderPlanner, StepShape

#: The roles of a layer's matrices and their biases.
_MATRICES = (("wqkv", "bqkv"), ("wo", "bo"), ("wgu", "bgu"), ("wd", "bd"))
#: Stands for the gamma of the norm behind a layer.
NEXT_GAMMA = "next_norm"


@dataclass(frozen=True)
class LayerPlanner:
    """One layer of a step.  workspace: temporary memory of the launches so far, by slot; grows."""

    model: DecoderPlanner
    shape: StepShape
    device: DeviceInfo
    products: Products
    prefix: str
    windowed: bool
    weight: dict[str, Operand]
    buffer: dict[str, Operand]
    workspace: dict[str, int]

    def _weight(self, role: str) -> Operand | None:
        return self.weight.get(self.prefix + role)

    def _matrix(self, role: str, bias: str) -> Weight:
        return Weight(self.weight[self.prefix + role], self._weight(bias), self._weight(f"{role}.scales"))

    def _norm(self, role: str) -> Norm:
        return Norm(self.weight[self.prefix + role], self.model.config.rms_norm_eps)

    def steps(self, stream: Stream) -> tuple[tuple[Step, ...], Stream]:
        """stream += attention(norm(stream)) wo, then += (activation(gate) * up) wd with gate and up of norm(stream)."""
        if stream.rows is not None:
            return self._few_rows(stream, stream.rows)
        qkv, attended, inner = (self.buffer[name] for name in ("qkv", "attended", "inner"))
        products, activation = self.products, self.model.config.activation
        steps = products.project(stream, self._norm("norm1"), self._matrix("wqkv", "bqkv"), qkv)
        steps += self._append(qkv) + self._attention(qkv, attended)
        added, stream = products.add(replace(stream, pending=False), attended, self._matrix("wo", "bo"))
        gated = products.gate(stream, self._norm("norm2"), self._matrix("wgu", "bgu"), inner, activation)
        steps += added + self._planned(gated)
        added, stream = products.add(replace(stream, pending=False), inner, self._matrix("wd", "bd"))
        return steps + added, stream

    def begin(self, tokens: Operand, table: Operand, stream: Stream) -> tuple[tuple[Step, ...], Stream]:
        """The first layer's stream: rows of the table, and what products read of them where all take few rows."""
        x = stream.x
        if not self._takes_few_rows(x):
            return plan_embed_tokens(tokens, table, x, self.device), stream
        squares = dense("squares", (x.shape[0], x.shape[1] // 128), dtypes.f32)
        rows = self._rows("x", dense("normed", x.shape, x.dtype), squares)
        gamma = self._norm("norm1").gamma
        return plan_embed_stream(tokens, table, gamma, x, rows, self.device), replace(stream, rows=rows)

    def _takes_few_rows(self, x: Operand) -> bool:
        """Whether a layer's products are those of `few_rows`: of a decode step, of whole blocks of 128."""
        c = self.model.config
        weights = [self._matrix(*names) for names in _MATRICES]
        widths = x.shape[1], *(self.buffer[name].shape[1] for name in ("qkv", "attended", "inner"))
        least = 1 if self.model.fp8 else DECODE_TOKENS + 1
        return (
            self.shape.decode and self.model.way is None and least <= x.shape[0] <= ROWS
            and self.device.arch == "sm_90a" and x.dtype == dtypes.bf16 and self.model.merge_inside
            and c.activation in ACTIVATIONS and (c.head_dim == 128 or not self.model.fp8)
            and not any(width % 128 for width in widths)
            and all((w.scales is not None) == self.model.fp8 for w in weights)
            and not any(w.bias for w in weights[1:])
        )  # fmt: skip

    def _rows(self, name: str, values: Operand, squares: Operand | None = None) -> Rows:
        """Memory for what a product reads: values, or of codes some in their place, in two parts of few."""
        tokens, width = values.shape
        eps = self.model.config.rms_norm_eps
        if not self.model.fp8:
            return Rows(values, None, squares, eps)
        rows = ROWS if tokens <= ROWS // 2 else tokens
        codes = dense(f"{name}_codes", (rows, width), dtypes.e4m3)
        return Rows(codes, dense(f"{name}_scales", (tokens, width // 128), dtypes.f32), squares, eps)

    def _few_rows(self, stream: Stream, of_x: Rows) -> tuple[tuple[Step, ...], Stream]:
        """`steps` by launches that hand each other rows; a norm's 1 / rms is applied by the product behind it."""
        x, qkv, attended, inner = stream.x, *(self.buffer[name] for name in ("qkv", "attended", "inner"))
        wqkv, wo, wgu, wd = (self._matrix(*names) for names in _MATRICES)

        def product(x: Rows, weight: Weight, **options: Any) -> tuple[Step, ...]:
            return plan_few_rows(x, weight.w, weight.scales, self.device, bias=weight.bias, **options)

        of_attended, of_inner = self._rows("inner", attended), self._rows("inner", inner)
        gamma = self._norm("norm2").gamma
        if self.model.kv_codes or self.model.config.head_dim != 128:
            steps = product(of_x, wqkv, y=qkv) + self._append(qkv)
        else:
            steps = product(of_x, wqkv, y=qkv, heads=self._heads())
        steps += self._attention(qkv, attended, of_attended)
        steps += product(of_attended, wo, y=x, to=of_x, gamma=gamma)
        steps += product(of_x, wgu, to=of_inner, activation=self.model.config.activation)
        steps += product(of_inner, wd, y=x, to=of_x, gamma=replace(gamma, slot=NEXT_GAMMA))
        return steps, stream

    def _planned(self, plan: Plan) -> tuple[Step, ...]:
        for slot, nbytes in plan.workspace:
            self.workspace[slot] = max(nbytes, self.workspace.get(slot, 0))
        return plan.steps

    def _split(self, qkv: Operand) -> tuple[Operand, Operand, Operand]:
        """Heads [tokens, heads, head_dim] of queries, keys and values."""
        c, (tokens, width) = self.model.config, qkv.shape

        def heads(count: int, first: int) -> Operand:
            return qkv.view((tokens, count, c.head_dim), (width, c.head_dim, 1), first * c.head_dim)

        kv = c.num_kv_heads
        return heads(c.num_heads, 0), heads(kv, c.num_heads), heads(kv, c.num_heads + kv)

    def _append(self, qkv: Operand) -> tuple[Step, ...]:
        """Norms of heads, rotation, keys and values to the cache."""
        q, k, v = self._split(qkv)
        tokens = self.shape.tokens
        return plan_append_kv(
            k, v, (self._cache("k"), self._cache("v")), dense("slot_mapping", (tokens,), dtypes.i64), self.device,
            q=q, q_out=q, positions=dense("positions", (tokens,), dtypes.i32), rotation=self._rotation(),
            q_norm_weight=self._weight("q_norm"), k_norm_weight=self._weight("k_norm"),
            norm_eps=self.model.config.rms_norm_eps, scales=self._scales(), overlaps=True,
        )  # fmt: skip

    def _heads(self) -> Heads:
        """The same inside a product of Q, K and V."""
        c, tokens = self.model.config, self.shape.tokens
        q_norm, k_norm = self._weight("q_norm"), self._weight("k_norm")
        return Heads(
            (self._cache("k"), self._cache("v")), dense("slot_mapping", (tokens,), dtypes.i64),
            dense("positions", (tokens,), dtypes.i32), self._table(),
            None if q_norm is None or k_norm is None else (q_norm, k_norm), c.rms_norm_eps,
        )  # fmt: skip

    def _attention(self, qkv: Operand, attended: Operand, to: Rows | None = None) -> tuple[Step, ...]:
        """attended, or in a decode step codes of it where `to` has some."""
        c, shape = self.model.config, self.shape
        tokens, width, dim = shape.tokens, qkv.shape[1], c.head_dim
        codes = None if to is None or to.scales is None else (to.values, to.scales)
        q_end = c.num_heads * dim
        q, k_cache, v_cache = self._split(qkv)[0], self._cache("k"), self._cache("v")
        left = c.sliding_window - 1 if c.sliding_window is not None and self.windowed else -1
        lengths = dense("seq_lens", (shape.sequences,), dtypes.i32)
        table = dense("block_table", (shape.sequences, self.model.cache.columns), dtypes.i32)
        if shape.decode:
            plan = plan_paged_attention(
                q.view((tokens, 1, c.num_heads, dim), (width, width, dim, 1)), k_cache, v_cache, lengths,
                attended.view((tokens, 1, c.num_heads, dim), (q_end, q_end, dim, 1)), self.device,
                block_table=table, left=left, scales=self._scales(), codes=codes,
                counters=self.buffer["counters"] if self.model.merge_inside else None,
                overlaps=True, keys_early=True,
            )  # fmt: skip
            return self._planned(plan)
        offsets = dense("cu_seqlens_q", (shape.sequences + 1,), dtypes.i32)
        packed = PackedSequences(offsets, lengths, table, shape.tile_length)
        steps: tuple[Step, ...] = ()
        if (scales := self._scales()) is not None:
            keys, values, starts = (self.buffer[name] for name in ("k_packed", "v_packed", "cu_seqlens_k"))
            steps = plan_gather_cache((k_cache, v_cache), scales, table, starts, (keys, values))
            packed = PackedSequences(offsets, starts, None, shape.tile_length)
            k_cache, v_cache = (t.view((1, *t.shape), (0, *t.strides)) for t in (keys, values))
        return steps + plan_attention(
            q.view((1, *q.shape), (0, *q.strides)), k_cache, v_cache,
            attended.view((1, tokens, c.num_heads, dim), (0, q_end, dim, 1)), device=self.device, causal=True,
            window=(left, -1), packed=packed,
        )  # fmt: skip

    def _cache(self, letter: str) -> Operand:
        geometry, c = self.model.cache, self.model.config
        extents = (geometry.num_blocks, geometry.block_size, c.num_kv_heads, c.head_dim)
        return dense(
            f"{self.prefix}{letter}_cache", extents, dtypes.e4m3 if self.model.kv_codes else self.model.dtype
        )

    def _scales(self) -> tuple[Operand, Operand] | None:
        """Of keys and values in an e4m3 cache."""
        if not self.model.kv_codes:
            return None
        extents = self._cache("k").shape[:3]
        k_scale, v_scale = (dense(f"{self.prefix}{letter}_scale", extents, dtypes.f32) for letter in "kv")
        return k_scale, v_scale

    def _rotation(self) -> Rotation:
        c = self.model.config
        if c.rope_scaling is None:
            return Rotation(c.head_dim, None, c.rope_theta)
        return Rotation(c.head_dim, self._table())

    def _table(self) -> Operand:
        """Cosines and sines: of weights whose rotation is scaled, or whose products rotate (`products_rotate`)."""
        return dense("cos_sin", (self.model.positions, self.model.config.head_dim), dtypes.f32)
