"""Rotary frequencies of a model, with the scalings that stretch them over longer contexts.

Plain rotation needs no table: `cki.append_kv` takes the base and is right at any position.  Scaled variants change each
pair's frequency on its own, so they come as a table of cosines and sines, computed in float64.  Products that rotate
heads themselves (`cki.ops.few_rows`) take any rotation from a table.

    linear   Chen et al. 2023, arXiv:2306.15595: positions divided by the factor
    llama3   Llama 3.1's: low frequencies divided by the factor, high ones kept, a ramp between
    factors  each frequency divided by its own factor, as GGUF files of Llama 3.1 have them
    yarn     Peng et al. 2023, arXiv:2309.00071: the ramp in numbers of turns, and a temperature on the rotated heads
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.engine.config import ModelConfig, RopeScaling
from cki.ops.few_rows import ARCH


def inverse_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Radians a position, of each of the head_dim / 2 pairs."""
    dim, scaling = config.head_dim, config.rope_scaling
    plain = config.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        stretched: NDArray[np.float64] = plain / scaling.factor
        return stretched
    if scaling.kind == "factors":
        divided: NDArray[np.float64] = plain / np.array(scaling.frequency_factors)
        return divided
    return _llama3(plain, scaling) if scaling.kind == "llama3" else _yarn(plain, config.rope_theta, scaling)


def magnitude(config: ModelConfig) -> float:
    """By what cosines and sines are multiplied: 1, but for YaRN and where the configuration says so."""
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.kind == "yarn" and scaling.factor > 1 else 1.0


def products_rotate(config: ModelConfig, dtype: DType, device: DeviceInfo) -> bool:
    """Whether products of few rows, which take cosines from a table, may rotate heads (`cki.ops.few_rows`)."""
    return device.arch == ARCH and dtype == dtypes.bf16 and config.head_dim == 128


def cos_sin_table(config: ModelConfig, positions: int, *, always: bool = False) -> NDArray[np.float32] | None:
    """f32 [positions, head_dim], cosines then sines, for `cki.append_kv`; None for plain rotation without `always`."""
    if config.rope_scaling is None and not always:
        return None
    angles = np.arange(positions, dtype=np.float64)[:, None] * inverse_frequencies(config)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * magnitude(config)
    return table.astype(np.float32)


def _llama3(plain: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    turns = scaling.original_max_position * plain / (2 * math.pi)  # of each pair over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns >= low).astype(float)
    blended: NDArray[np.float64] = kept * plain + (1 - kept) * plain / scaling.factor
    return blended


def _yarn(plain: NDArray[np.float64], theta: float, scaling: RopeScaling) -> NDArray[np.float64]:
    dim = 2 * len(plain)

    def pair_of(turns: float) -> float:
        """The pair that makes so many turns over the original context."""
        return dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    stretched = np.clip((np.arange(len(plain)) - first) / width, 0.0, 1.0)
    blended: NDArray[np.float64] = stretched * plain / scaling.factor + (1 - stretched) * plain
    return blended
