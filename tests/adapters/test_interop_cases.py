"""The eighteen interoperability facts that public bug reports teach, and the tests that show each of them.

`CASES` maps a fact to its tests: each must exist and say the fact's name.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError
from tests.adapters.programs import output_of

HERE = Path(__file__).parent

CASES = {
    "dlpack_requires_grad": ["test_torch.py::test_requires_grad_outside_no_grad_is_refused",
                             "test_calls.py::test_parameters_under_no_grad_and_inference_mode"],
    "dlpack_byte_offset": ["../test_dlpack.py::test_byte_offset_moves_the_first_element"],
    "dlpack_empty_tensor": ["../test_dlpack.py::test_empty_tensor_may_have_any_pointer_and_strides",
                            "test_calls.py::test_empty_batches_give_empty_results"],
    "dlpack_stream_values": ["../test_dlpack.py::test_stream_zero_is_never_passed_on",
                             "test_gpu.py::test_interface_stream_is_waited_for_and_temporaries_live"],
    "dlpack_during_graph_capture": ["test_pycuda.py::test_no_producer_waits_while_a_graph_is_captured",
                                    "test_torch_gpu.py::test_torch_graph_capture",
                                    "test_gpu.py::test_cupy_graph_capture"],
    "dlpack_lifetime_async": ["test_torch_gpu.py::test_torch_temporaries_may_be_dropped_after_the_call",
                              "test_gpu.py::test_interface_stream_is_waited_for_and_temporaries_live",
                              "test_gpu_tensorflow.py::test_temporaries_may_be_dropped_after_the_call"],
    "kernel_on_the_callers_stream": ["test_torch_gpu.py::test_torch_call_runs_on_the_current_stream",
                                     "test_gpu.py::test_cupy_call_runs_on_the_current_stream"],
    "tensorflow_streams": ["test_gpu_tensorflow.py::test_hundred_calls_in_a_row_without_synchronising"],
    "second_gpu_while_device0_current": ["test_two_gpus.py::test_torch_tensors_on_the_second_gpu",
                                         "test_two_gpus.py::test_cupy_arrays_on_the_second_gpu"],
    "mixed_devices": ["test_adapter.py::test_mixed_devices_name_each_argument",
                      "test_calls.py::test_cpu_tensors_on_the_cuda_device_are_refused",
                      "test_torch_gpu.py::test_cpu_tensors_beside_gpu_tensors_are_refused",
                      "test_two_gpus.py::test_mixed_gpus_are_refused_by_name"],
    "current_device_not_changed": ["test_torch_gpu.py::test_device_and_stream_are_left_as_they_were",
                                   "test_two_gpus.py::test_cupy_arrays_on_the_second_gpu"],
    "bool_mask_dtype": ["test_calls.py::test_boolean_masks_of_either_type_give_the_same"],
    "jax_layout_from_strided": ["test_jax.py::test_layouts_other_than_row_major_have_their_strides",
                                "test_calls.py::test_column_major_jax_arrays_are_read_by_their_strides",
                                "test_calls.py::test_transposed_tensors_are_read_by_their_strides"],
    "graph_capture_no_allocation": ["test_torch_gpu.py::test_torch_first_call_inside_a_capture"],
    "import_is_inert": ["test_adapter.py::test_adapters_import_only_the_framework_of_the_tensor",
                        "test_interop_cases.py::test_import_then_fork_then_call",
                        "test_interop_cases.py::test_import_before_and_after_torch",
                        "test_gpu_pipelines.py::test_a_child_forked_after_cuda_was_used_says_so"],
    "dropout_not_silently_constant": ["test_interop_cases.py::test_dropout_is_seeded_by_device_memory"],
    "processes_share_the_kernel_cache": ["../test_cache.py::test_many_processes_compile_once",
                                         "../test_cache.py::test_damaged_file_is_compiled_again_and_replaced",
                                         "../test_cache.py::test_read_only_home",
                                         "../test_cache.py::test_full_disk_leaves_no_partial_file"],
    "torch_compile_opaque_op": ["test_torch_ops.py::test_public_functions_compile_to_one_graph",
                                "test_torch_ops.py::test_inductor_with_a_dynamic_batch_compiles_once"],
}  # fmt: skip


def test_all_eighteen_facts_are_in_the_table():
    assert len(CASES) == 18


@pytest.mark.parametrize("fact", CASES)
def test_the_tests_of_a_fact_exist_and_name_it(fact):
    for test in CASES[fact]:
        file, _, name = test.partition("::")
        functions = [
            node for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        (found,) = [function for function in functions if function.name == name]
        assert fact in (ast.get_docstring(found) or ""), f"{test} does not name {fact}"


def test_import_then_fork_then_call():
    """import_is_inert: a fork after the import, and after a call, works in the child."""
    program = (
        "import os, numpy as np, cki\n"
        "def call():\n"
        "    with cki.device('sim'):\n"
        "        return float(np.abs(cki.layer_norm(np.arange(32, dtype='f4').reshape(2, 16))).sum())\n"
        "def in_child():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os._exit(0 if abs(call() - 27.77) < 0.1 else 1)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "in_child(); call(); in_child()\n"
        "print('both')\n"
    )
    assert output_of(program) == "both\n"


@pytest.mark.torch
@pytest.mark.parametrize("order", [("torch", "cki"), ("cki", "torch")])
def test_import_before_and_after_torch(order):
    """import_is_inert: any order of imports, and importing cki pulls in no framework."""
    pytest.importorskip("torch")
    program = (
        f"import {order[0]}, sys\n"
        f"assert ('torch' in sys.modules) == {order[0] == 'torch'}\n"
        f"import {order[1]}, torch, cki\n"
        "with cki.device('sim'):\n"
        "    print(cki.layer_norm(torch.zeros(2, 16)).abs().sum().item())\n"
    )
    assert output_of(program) == "0.0\n"


def test_dropout_is_seeded_by_device_memory():
    """dropout_not_silently_constant: by name only with a seed and a counter, which alone decide what is dropped."""
    q = np.ones((1, 70, 2, 8), np.float32)
    seed, first, second = (np.array([number], np.int64) for number in (7, 0, 1))

    def dropped(q: np.ndarray, offset: np.ndarray) -> np.ndarray:
        return cki.attention(q, q, q, dropout_p=0.5, dropout_seed=seed, dropout_offset=offset)

    with cki.device("sim"):
        with pytest.raises(InvalidArgumentError, match="dropout_p is 0.5 without dropout_seed"):
            cki.attention(q, q, q, dropout_p=0.5)
        assert np.array_equal(cki.attention(q, q, q, dropout_p=0.0), cki.attention(q, q, q))
        assert np.array_equal(dropped(q, first), dropped(q.copy(), first.copy()))
        assert not np.array_equal(dropped(q, first), dropped(q, second))
