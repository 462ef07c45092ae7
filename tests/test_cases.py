"""The cases made from public bug reports (`tests/cases.py`, kept as it came) on the operations that exist.

`run_case` is the adapter: it lays tensors out in memory as the case says and calls cki.  Descriptions of interoperation
between frameworks stand in a table; a test compares it with the list of all cases, so that none is forgotten when
either grows.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cki
from tests import cases
from tests.conftest import DeviceUnderTest

COVERED_OPERATIONS = (
    "attention", "layer_norm", "rms_norm", "add_rms_norm", "merge_states", "append_kv", "fp8_quantize", "rope",
    "decode_paged", "varlen_attention", "swiglu", "geglu",
)  # fmt: skip

#: Cases without tensors that run in a test of their own.
RUN_ELSEWHERE = {"block_allocator": "tests/memory/test_blocks.py::test_script"}

#: Descriptions without numbers: facts about frameworks, streams and processes, each a test of its own elsewhere.
INTEROP = (
    "dlpack_requires_grad", "dlpack_byte_offset", "dlpack_empty_tensor", "dlpack_stream_values",
    "dlpack_during_graph_capture", "dlpack_lifetime_async", "kernel_on_the_callers_stream", "tensorflow_streams",
    "second_gpu_while_device0_current", "mixed_devices", "current_device_not_changed", "bool_mask_dtype",
    "jax_layout_from_strided", "graph_capture_no_allocation", "processes_share_the_kernel_cache", "import_is_inert",
    "torch_compile_opaque_op", "dropout_not_silently_constant",
)  # fmt: skip

#: Cases that the simulated device runs in one type only, and why; the GPU runs them in all.
ONE_DTYPE_WHEN_SIMULATED = {
    "attn_grid_limit_batch_65537": (
        "float16",
        "65537 blocks take about 5 s a type, and the limit of the grid does not depend on the type",
    ),
}

#: Types in which a case is refused by a rule of the operation.
REFUSED_DTYPES = {"paged_fp8_kv_scales_both_used": ("float32", "q of f16 or bf16 with e4m3")}

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@functools.cache
def all_cases() -> dict[str, cases.Case]:
    return {case.name: case for case in cases.build()}


def covered(kind: str) -> list[Any]:
    """(name, dtype) of the cases of that kind which run here; of error cases one dtype is enough."""
    found = []
    for case in all_cases().values():
        if case.op in COVERED_OPERATIONS and case.kind == kind:
            dtypes = case.dtypes if kind == "numeric" else case.dtypes[:1]
            found += [pytest.param(case.name, dtype, id=f"{case.name}-{dtype}") for dtype in dtypes]
    return found


def place(device: DeviceUnderTest, values: Any, dtype: Any, layout: dict[str, Any] | None) -> Any:
    """The values as an array of the device in the memory layout that the case asks for."""
    values = np.asarray(values)
    if layout is None:
        return device.array(values.astype(dtype))
    buffer, shape, strides, offset = cases.memory_plan(values, layout)
    flat = device.array(buffer.astype(dtype))[offset:]
    if isinstance(flat, np.ndarray):
        as_strided: Any = np.lib.stride_tricks.as_strided
    else:
        import cupy

        as_strided = cupy.lib.stride_tricks.as_strided
    return as_strided(flat, shape, tuple(stride * flat.itemsize for stride in strides))


def quantized(device: DeviceUnderTest, x: Any) -> Any:
    """x [n] as e4m3 codes of scale 1: appended to a cache of one slot as the only head of one token."""
    shape = (1, 1, x.shape[0])
    codes = [device.array(np.zeros((1, *shape), E4M3)) for _ in range(2)]
    scale, slot = device.array(np.ones(1, np.float32)), device.array(np.zeros(1, np.int64))
    cki.append_kv(x.reshape(shape), x.reshape(shape), (*codes, scale, scale), slot)
    assert np.array_equal(device.numpy(codes[0]).view(np.uint8), device.numpy(codes[1]).view(np.uint8))
    return codes[0]


def decode_paged(device: DeviceUnderTest, tensors: dict[str, Any], params: dict[str, Any]) -> Any:
    """The case's cache by cki.paged_attention; one with scales is encoded, without loss, as e4m3."""
    cache = [tensors["k_pages"], tensors["v_pages"]]
    scales = [params.pop(name, None) for name in ("k_scale", "v_scale")]
    if scales[0] is not None:
        heads = cache[0].shape[2]
        cache = [device.array(device.numpy(pages).astype(E4M3)) for pages in cache]
        cache += [device.array(np.full(heads, scale, np.float32)) for scale in scales]
    table, lengths = tensors["block_table"], tensors["seq_lens"]
    return cki.paged_attention(tensors["q"], tuple(cache), table, lengths, **params, return_lse=True)


def run_case(
    device: DeviceUnderTest, case: cases.Case, inputs: dict[str, Any], dtype: str
) -> dict[str, np.ndarray]:
    """Calls cki with the case's inputs and parameters; outputs as float64."""
    if case.op == "fp8_quantize" or "k_scale" in case.params:
        device = device.holding(E4M3)
    cast = inputs.get("__cast__", {})
    tensors: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(value, np.ndarray):
            continue
        if value.dtype.kind == "f":
            target = np.float32 if name in case.fixed else DTYPES[cast.get(name, dtype)]
        else:
            target = DTYPES[cast[name]] if name in cast else value.dtype
        tensors[name] = place(device, value, target, case.layouts.get(name))
    params = dict(case.params)
    if case.op == "attention":
        out, lse = cki.attention(**tensors, **params, return_lse=True)
        results = {"out": out, "lse": lse}
    elif case.op == "merge_states":
        out, lse = cki.merge_states(tensors["o"], tensors["lse"])
        results = {"out": out, "lse": lse}
    elif case.op == "append_kv":
        cache = (tensors["k_pages"], tensors["v_pages"])
        cki.append_kv(tensors["k_new"], tensors["v_new"], cache, tensors["slots"])
        results = {"k_pages": cache[0], "v_pages": cache[1]}
    elif case.op == "decode_paged":
        out, lse = decode_paged(device, tensors, params)
        results = {"out": out, "lse": lse}
    elif case.op == "varlen_attention":
        offsets = tensors.pop("cu_q"), tensors.pop("cu_k")
        out, lse = cki.varlen_attention(*tensors.values(), *offsets, **params, return_lse=True)
        results = {"out": out, "lse": lse}
    elif case.op == "fp8_quantize":
        codes = quantized(device, tensors["x"])
        one = device.array(np.ones(1, np.float32))
        alone = cki.quantize_fp8(tensors["x"], scale=one, granularity="tensor", out_dtype="uint8")
        assert np.array_equal(device.numpy(alone), device.numpy(codes).reshape(-1).view(np.uint8))
        return {"codes": device.numpy(alone).astype(np.float64)}
    elif case.op == "swiglu":
        results = {"out": cki.gated_activation(**tensors, **params)}
    elif case.op == "geglu":
        activation = {"none": "gelu", "tanh": "gelu_tanh"}[params.pop("approximate")]
        results = {"out": cki.gated_activation(**tensors, **params, activation=activation)}
    elif case.op == "rope":
        results = {"out": cki.apply_rope(**tensors, **params)}
    elif case.op == "layer_norm":
        results = {"out": cki.layer_norm(**tensors, **params)}
    elif case.op == "rms_norm":
        results = {"out": cki.rms_norm(**tensors, **params)}
    else:
        out, residual = cki.rms_norm(**tensors, **{"normalize": params.pop("normalise"), **params})
        results = {"out": out, "residual": residual}
    return {name: device.numpy(value).astype(np.float64) for name, value in results.items()}


@pytest.mark.parametrize(("name", "dtype"), covered("numeric"))
def test_numeric_case(device: DeviceUnderTest, name: str, dtype: str) -> None:
    case = all_cases()[name]
    if name in REFUSED_DTYPES and dtype == REFUSED_DTYPES[name][0]:
        with pytest.raises(cki.CkiError, match=REFUSED_DTYPES[name][1]):
            run_case(device, case, case.rounded(dtype), dtype)
        return
    simulated = ONE_DTYPE_WHEN_SIMULATED.get(name)
    if device.kind == "sim" and simulated is not None and simulated[0] != dtype:
        pytest.skip(f"on the simulated device in {simulated[0]} only: {simulated[1]}")
    for variant in [None, *case.variants]:
        got = run_case(device, case, case.rounded(dtype, variant), dtype)
        assert cases.compare(case, got, case.expected(dtype, variant), dtype) == []


@pytest.mark.parametrize(("name", "dtype"), covered("error"))
def test_error_case(device: DeviceUnderTest, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = all_cases()[name]
    monkeypatch.setenv("CKI_VALIDATE", "1")  # lengths and tables are looked at in this mode only
    assert case.error is not None
    with pytest.raises((ValueError, TypeError)) as caught:
        run_case(device, case, case.rounded(dtype), dtype)
    assert {t.__name__ for t in type(caught.value).__mro__} & set(case.error["types"])
    assert isinstance(caught.value, cki.CkiError)
    for word in case.error["mention"]:
        assert word.lower() in str(caught.value).lower()


def test_every_case_runs_or_is_listed() -> None:
    listed = dict.fromkeys(INTEROP, "interop")
    elsewhere = {*COVERED_OPERATIONS, *RUN_ELSEWHERE}
    not_run = {case.name: case.op for case in all_cases().values() if case.op not in elsewhere}
    assert listed == not_run
    for test in RUN_ELSEWHERE.values():
        path, _, function = test.partition("::")
        assert f"def {function}(" in (Path(__file__).parents[1] / path).read_text(encoding="utf-8")
