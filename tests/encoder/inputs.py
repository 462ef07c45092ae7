"""Inputs that the tests of `cki.Encoder` share."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
LENGTHS = np.array([9, 4, 1])
OFFSETS = np.array([0, 7, 7, 40, 41, 46])
MASK = (np.arange(9) < LENGTHS[:, None]).astype(np.int64)


def some_ids(config, batch=3, seq=9, seed=1):
    """Token ids, padded behind LENGTHS where the batch is of that size."""
    ids = np.random.default_rng(seed).integers(3, config["vocab_size"], (batch, seq))
    if batch == len(LENGTHS) and seq == 9:
        ids[MASK == 0] = config["pad_token_id"]
    return ids


def on(device, arrays, dtype=np.float32):
    return {name: device.array(value.astype(dtype)) for name, value in arrays.items()}
