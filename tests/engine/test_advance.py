"""From one decode step to the next on the device: the kernel against its definition, and the block table's upload."""

from __future__ import annotations

import numpy as np
import pytest

from cki import dtypes
from cki.engine.device_memory import DeviceTensors
from cki.engine.program import StepProgram
from cki.memory import PagedKVCache
from cki.operand import dense
from cki.ops.advance import plan_advance
from cki.plan import Plan
from tests.engine.advance_definition import advance

ROWS, COLUMNS, BLOCK_SIZE, ENDS = 150, 9, 4, 3


@pytest.fixture
def tables():
    """Lengths of every kind: empty, at a block's end, at the limit, at the table's end; tokens that end a row."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, COLUMNS * BLOCK_SIZE + 1, ROWS)
    lengths[:4] = 0, COLUMNS * BLOCK_SIZE, BLOCK_SIZE, 1
    return {
        "chosen": rng.integers(0, 6, ROWS), "ends": rng.integers(-1, 3, (ROWS, ENDS)),
        "limits": lengths + rng.integers(1, 4, ROWS), "block_table": rng.integers(0, 2**29, (ROWS, COLUMNS)),
        "seq_lens": lengths, "tokens": np.full(ROWS, 77), "positions": np.full(ROWS, 7), "slots": np.full(ROWS, 9),
    }  # fmt: skip


def run(device, tables, given):
    """The tables after the launch, by name."""
    specs = [(name, v.shape, dtypes.i64 if name == "slots" else dtypes.i32) for name, v in tables.items()]
    memory = DeviceTensors(device.info, [*specs, ("given", (1,), dtypes.u32)])
    for name, values in tables.items():
        memory.write(name, values)
    memory.write("given", np.array([given]))
    memory.finish()
    operands = {name: dense(name, *spec) for name, *spec in specs}
    steps = plan_advance(dense("given", (1,), dtypes.u32), block_size=BLOCK_SIZE, **operands)
    StepProgram(Plan(steps), device.info, dict(memory.items())).launch(0)
    return {name: tensor.numpy().copy() for name, tensor in memory.items()}


def test_it_is_the_definition(device, tables):
    found = run(device, tables, 0)
    names = ("chosen", "ends", "limits", "block_table", "seq_lens")
    expected = advance(*(tables[name] for name in names), block_size=BLOCK_SIZE)
    alive = tables["seq_lens"] > 0
    for name, values in expected._asdict().items():
        assert np.array_equal(found[name][alive], values[alive]), name
        assert np.array_equal(found[name][~alive], tables[name][~alive])
    assert 20 < (found["seq_lens"] > 0).sum() < 130
    assert found["slots"].max() > 2**30


def test_what_the_host_has_given_stays(device, tables):
    found = run(device, tables, 1)
    for name, values in tables.items():
        assert np.array_equal(found[name], values)
    assert found["given"] == 0


def test_a_step_s_extension_uploads_the_block_table_alone():
    cache = PagedKVCache(
        1, 12, block_size=4, num_kv_heads=1, head_dim=8, dtype="f32", max_sequences=3, device="sim"
    )
    a, b = cache.allocate_sequence(), cache.allocate_sequence()
    cache.prepare_step([a, b], [3, 7])
    slots = cache.table("slot_mapping").numpy().copy()
    for _ in range(3):
        cache.extend_step([a, b])
    assert np.array_equal(cache.table("slot_mapping").numpy(), slots)
    assert cache.seq_lens.numpy()[:2].tolist() == [3, 7]
    assert (cache.length(a), cache.length(b)) == (6, 10)
    table = cache.block_table.numpy()
    assert table[0, :2].tolist() == cache.blocks(a)
    assert table[1, :3].tolist() == cache.blocks(b)
