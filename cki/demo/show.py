"""The demo itself: embed the sentences on a device, compare with the float64 reference, print and draw."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cki
from cki import reference
from cki.demo import minilm, report
from cki.demo.minilm import Array, MiniLM, Tokens
from cki.demo.place import Place, choose
from cki.log import logger

_NUMPY_DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}

#: Sentences of one forward pass: enough to fill a device, few enough that padding to the longest wastes little.
BATCH = 16


#: Passes after the first, of which the fastest is reported.  The simulated device's time is no measurement.
EXTRA_PASSES = {"sim": 0, "cuda": 10}


class Embedded(NamedTuple):
    """vectors: float64 [sentences, hidden].  build_seconds: to put the weights on the device, and to plan and build
    the kernels.  pass_seconds: of the fastest pass, copies of results included.  launches: of one pass."""

    vectors: Array
    build_seconds: float
    pass_seconds: float
    launches: int


def show(sentences: Sequence[str], device: str, dtype: str, png: Path, *, build_only: bool = False) -> None:
    """Runs the demo and prints what it finds.

    device: "auto", "sim" or "cuda".  dtype: "f32", "f16" or "bf16".  png: where the heat map goes.
    build_only: builds the kernels and stops.
    """
    minilm.check_sentences(sentences)
    report.check_png(png)
    place = choose(device)
    print(f"device: {place}", flush=True)
    if place.why_not_gpu:
        print(f"        the GPU is not used: {place.why_not_gpu}")
    model = minilm.load()
    tokens = model.tokenize(sentences)
    limit = minilm.MAX_TOKENS
    for number, length in enumerate(tokens.truncated, 1):
        if length:
            print(f"note: text {number} has {length} tokens; the model reads the first {limit}")
    embedded = embed(model, tokens, place, dtype, build_only=build_only)
    if build_only:
        print(f"kernels are built ({_duration(embedded.build_seconds)})")
        return
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
    build, run = _duration(embedded.build_seconds), _duration(embedded.pass_seconds)
    print(f"time: {run} for the sentences, after {build} to load the weights and build the kernels")
    print(f"kernel launches: {embedded.launches} a pass")
    report.write_heat_map(png, sentences, similarity, f"all-MiniLM-L6-v2, cosine similarity, on {place}")
    print(f"heat map: {png}")


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _batches(tokens: Tokens) -> list[Array]:
    """Sentence numbers in groups of similar length."""
    order = np.argsort(tokens.lengths, kind="stable")
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def embed(model: MiniLM, tokens: Tokens, place: Place, dtype: str, *, build_only: bool = False) -> Embedded:
    """Embeds tokenized sentences with `cki.Encoder`.  build_only: stops before anything runs; the vectors are zero."""
    numpy_dtype = _NUMPY_DTYPES[dtype]
    vectors = np.zeros((len(tokens.lengths), int(model.config["hidden_size"])))
    passes = 0 if build_only else 1 + EXTRA_PASSES[place.info.kind]
    seconds, launches = [0.0], 0

    with cki.device(place.info.kind), report.Progress(None) as bar:
        start = time.perf_counter()
        bar.begin("loading weights")
        weights = {
            name: place.put(array.astype(numpy_dtype, copy=False)) for name, array in model.weights.items()
        }
        encoder = cki.Encoder.from_weights(weights, model.config)
        batches = [(rows, *_inputs(tokens, rows, place)) for rows in _batches(tokens)]
        with LaunchCounter(on_compiled=lambda source: bar.doing(f"built {source}")):
            bar.total = bar.begun + sum(encoder.build(ids, mask, pooling="mean") for _, ids, mask in batches)
        build_seconds = time.perf_counter() - start
        for number in range(passes):
            with contextlib.ExitStack() as stack:
                counter = stack.enter_context(LaunchCounter(on_launch=bar.begin)) if number == 0 else None
                start = time.perf_counter()
                for rows, ids, mask in batches:
                    vectors[rows] = place.get(encoder.embed(ids, mask))
                seconds.append(time.perf_counter() - start)
                launches = counter.count if counter else launches
    return Embedded(vectors, build_seconds, min(seconds[1:] or seconds), launches)


def _inputs(tokens: Tokens, rows: Array, place: Place) -> tuple[Any, Any]:
    """Ids and mask of a batch, cut to its longest sentence, on the device."""
    longest = tokens.lengths[rows].max()
    ids, mask = tokens.ids[rows, :longest], tokens.mask[rows, :longest]
    return place.put(np.ascontiguousarray(ids)), place.put(np.ascontiguousarray(mask))


def embed_reference(model: MiniLM, tokens: Tokens) -> Array:
    """The same embeddings by `cki.reference`, in float64 throughout."""
    with cki.device("sim"):
        encoder = cki.Encoder.from_weights(model.weights, model.config)
    return reference.encoder_embed(encoder.weights, encoder.config, tokens.ids, tokens.mask)


_LINE = re.compile(r"(compiled|launch) ([\w/.]+)")


class LaunchCounter(logging.Handler):
    """While it is active, `count` is the number of launches so far.

    on_launch, on_compiled: told the name of a kernel before it is launched, of a source when it was compiled.
    """

    def __init__(
        self,
        on_launch: Callable[[str], object] | None = None,
        on_compiled: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(logging.INFO)
        self.count = 0
        self._told = {"launch": on_launch, "compiled": on_compiled}

    def __enter__(self) -> LaunchCounter:
        self._level, self._propagate = logger.level, logger.propagate
        if logger.getEffectiveLevel() > logging.INFO:
            # The lines are for this handler alone, unless the user asked for them.
            logger.propagate = False
            logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logger.removeHandler(self)
        logger.setLevel(self._level)
        logger.propagate = self._propagate

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger for each line."""
        line = _LINE.match(record.getMessage())
        if line is None:
            return
        what, name = line.groups()
        self.count += what == "launch"
        tell = self._told[what]
        if tell is not None:
            tell(name)
