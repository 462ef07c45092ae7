"""The demo itself: embed the sentences on a device, compare with the float64 reference, print and draw."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cki
from cki import reference
from cki.demo import encoder, minilm, report
from cki.demo.launches import LaunchCounter
from cki.demo.minilm import Array, BertWeights, LayerWeights, MiniLM, Tokens
from cki.demo.place import Place, choose

_NUMPY_DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}

#: Sentences of one forward pass: enough to fill a device, few enough that padding to the longest wastes little.
BATCH = 16


class Embedded(NamedTuple):
    """vectors: float64 [sentences, hidden].  seconds: of the first pass, kernel builds included, and of a second
    pass, when nothing is left to build.  launches: kernels launched in one pass."""

    vectors: Array
    first_seconds: float
    seconds: float
    launches: int


def show(sentences: Sequence[str], device: str, dtype: str, png: Path) -> Embedded:
    """Runs the demo and prints what it finds.

    device: "auto", "sim" or "cuda".  dtype: "f32", "f16" or "bf16".  png: where the heat map goes.
    """
    minilm.check_sentences(sentences)
    report.check_png(png)
    place = choose(device)
    print(f"device: {place}", flush=True)
    if place.why_not_gpu:
        print(f"        (no GPU: {place.why_not_gpu})")
    model = minilm.load()
    tokens = model.tokenize(sentences)
    limit = model.config.max_tokens
    for number, length in enumerate(tokens.truncated, 1):
        if length:
            print(f"note: text {number} has {length} tokens; the model reads the first {limit}")
    embedded = embed(model, tokens, place, dtype)
    similarity = embedded.vectors @ embedded.vectors.T
    print(
        f"model:  all-MiniLM-L6-v2, {dtype}, {len(sentences)} sentences, {int(tokens.lengths.sum())} tokens"
    )
    print()
    print("cosine similarity")
    print(report.similarity_table(sentences, similarity))
    print()
    error = np.abs(embedded.vectors - embed_reference(model, tokens)).max()
    print(f"largest error against cki.reference in float64: {error:.2e} (components of unit vectors)")
    first, warm = _duration(embedded.first_seconds), _duration(embedded.seconds)
    print(f"time: {first} with kernel builds and data transfer, {warm} once they are there")
    print(f"kernel launches: {embedded.launches} a pass")
    report.write_heat_map(png, sentences, similarity, f"all-MiniLM-L6-v2, cosine similarity, on {place}")
    print(f"heat map: {png}")
    return embedded


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _batches(tokens: Tokens) -> list[Array]:
    """Sentence numbers in groups of similar length."""
    order = np.argsort(tokens.lengths, kind="stable")
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def convert(weights: BertWeights, how: Any) -> BertWeights:
    """The weights with `how` applied to every array."""
    layers = tuple(LayerWeights(*(how(array) for array in layer)) for layer in weights.layers)
    words, positions, types, gamma, beta = (how(array) for array in weights[:5])
    return BertWeights(words, positions, types, gamma, beta, layers)


def embed(model: MiniLM, tokens: Tokens, place: Place, dtype: str) -> Embedded:
    """Embeds tokenized sentences with CKI's kernels, twice: the first pass builds what is not built yet."""
    numpy_dtype = _NUMPY_DTYPES[dtype]
    batches = _batches(tokens)
    calls = len(batches) * (model.config.layers + encoder.CALLS_BESIDE_LAYERS)
    vectors = np.empty((len(tokens.lengths), model.config.hidden))

    def run(weights: BertWeights, bar: report.Progress) -> None:
        for rows in batches:
            longest = tokens.lengths[rows].max()
            ids = place.put(np.ascontiguousarray(tokens.ids[rows, :longest]))
            mask = place.put(np.ascontiguousarray(tokens.mask[rows, :longest]))
            vectors[rows] = place.get(encoder.forward(cki, model.config, weights, ids, mask, bar.begin))

    with cki.device(place.info.kind), report.Progress(2 * calls) as bar, LaunchCounter(bar.doing) as counter:
        start = time.perf_counter()
        weights = convert(model.weights, lambda array: place.put(array.astype(numpy_dtype, copy=False)))
        run(weights, bar)
        first = time.perf_counter() - start
        launches = counter.count
        start = time.perf_counter()
        run(weights, bar)
        second = time.perf_counter() - start
    return Embedded(vectors, first, second, launches)


def embed_reference(model: MiniLM, tokens: Tokens) -> Array:
    """The same embeddings by `cki.reference` in float64, one sentence at a time: no padding, no batching."""
    weights = convert(model.weights, lambda array: array.astype(np.float64))
    vectors = []
    for ids, length in zip(tokens.ids, tokens.lengths):
        mask = np.ones((1, length), bool)
        vectors.append(encoder.forward(reference, model.config, weights, ids[None, :length], mask)[0])
    return np.stack(vectors)
