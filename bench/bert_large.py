"""BERT-large from token ids to the last hidden state: `cki.Encoder` against PyTorch and TensorFlow, timed in turn.

    python bench/bert_large.py                                  # 4 x 128 to 4 x 4096, both norm orders, and packed
    python bench/bert_large.py --batch 4 --seq-len 2048 --iters 50
    python bench/bert_large.py --packed --batch 64              # random lengths 32..512 against padded torch
    python bench/bert_large.py --without compile --without tf   # torch.compile takes a minute or two
    python bench/bert_large.py --profile --seq-len 512 2048     # time of each launch of CKI's graph
    python bench/bert_large.py --plan                           # launches of a layer and what they should take; no GPU

fp16, the same random weights for all: CKI takes them as a state dict, prepared and captured as a graph; torch SDPA and
torch.compile max-autotune are replayed from CUDA graphs; tf.function, TF XLA and CKI inside TensorFlow (a Keras model
in a tf.function) where TensorFlow with a GPU imports.  compile, tf, xla and keras run in processes of their own, each
with a time limit for its preparation (--limit).  compile has a process for each shape; they prepare at the same time,
before anything is timed.  TORCHINDUCTOR_CACHE_DIR keeps what it found for the next run.

Before timing, every output is compared with torch's in float32: ours may have twice the largest error of torch SDPA,
plus 1e-5 of the largest value, or the program ends; another baseline with four times that error is left out.  A time is
that of a warm forward pass, from 20 ms of them; all take turns, one time a round in an order of its own, and with them
an fp16 product of 8192^3, the yardstick of the model's FLOP/s.  The weights alone exceed the L2 cache ten times.
"""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import functools
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import bert_model
import bert_tables
import common
import numpy as np
import peers
import peers_torch
from bert_model import Array, Model, Problem
from bert_tables import Measured

import cki

SEQ_LENS = (128, 512, 1024, 2048, 4096)
PACKED_BATCH = 64


class Peer(NamedTuple):
    """A baseline in a process of its own.  is_packed: also measured on padded batches of other lengths.
    by_shape: in one for each shape, which are prepared at the same time.  is_extra: only when asked for (--with)."""

    name: str
    factory: str
    is_packed: bool
    by_shape: bool = False
    is_extra: bool = False


#: By what --without calls them.
PEERS = {
    "compile": Peer("torch.compile", "peers_torch:Compiled", True, by_shape=True),
    "whole": Peer("torch.compile, whole", "peers_torch:CompiledWhole", False, by_shape=True, is_extra=True),
    "tf": Peer("tf.function", "peers_tensorflow:tf_function", False),
    "xla": Peer("TF XLA", "peers_tensorflow:tf_xla", False),
    "keras": Peer("cki in Keras", "peers_keras:keras_function", False),
}
SDPA, CKI, GEMM = "torch SDPA", "cki", "GEMM"


class Cki:
    """`cki.Encoder` on torch tensors, prepared and captured."""

    def __init__(self, model: Model, device: str) -> None:
        import torch

        self._model, self._device = model, device
        self._weights = {
            name: torch.from_numpy(value).to(device) for name, value in bert_model.state_dict(model).items()
        }
        self._encoders: dict[bool, cki.Encoder] = {}  # by the norm order
        self._graph: Any = None
        self._timer: peers_torch.Timer

    @property
    def launches(self) -> int:
        """Kernels of a forward pass."""
        return int(self._graph.num_kernels)

    def close(self) -> None:
        """Frees the graph.  Idempotent."""
        if self._graph is not None:
            self._graph.close()

    def replay(self) -> None:
        """A forward pass."""
        self._graph.replay()

    def prepare(self, problem: Problem) -> Array:
        self.close()
        encoder, ids, options = self._call(problem)
        self._graph = cki.capture(encoder, ids, **options)
        self._timer = peers_torch.Timer(self.replay, self._device)
        output: Array = self._graph.outputs.float().cpu().numpy().reshape(problem.tokens, -1)
        return output

    def build(self, problem: Problem) -> None:
        """Compiles what `prepare` will launch."""
        encoder, ids, options = self._call(problem)
        encoder.build(ids, **options)

    def _call(self, problem: Problem) -> tuple[cki.Encoder, Any, dict[str, Any]]:
        """An encoder, its ids, and what else a call is given."""
        import torch

        pre_ln = problem.pre_ln
        if pre_ln not in self._encoders:
            weights = {  # a last norm is the pre-LN order's alone
                name: weight
                for name, weight in self._weights.items()
                if pre_ln or not name.startswith("LayerNorm")
            }
            self._encoders[pre_ln] = cki.Encoder.from_weights(
                weights, num_heads=self._model.heads, pre_ln=pre_ln, epsilon=bert_model.EPSILON
            ).prepare()
        ids, _ = peers_torch.inputs(self._model, problem, self._device)
        if not problem.lengths:
            return self._encoders[pre_ln], ids, {}
        ids = ids[torch.from_numpy(bert_model.kept_tokens(problem)).to(self._device)]
        offsets = torch.from_numpy(bert_model.offsets(problem)).to(self._device)
        return self._encoders[pre_ln], ids, {"cu_seqlens": offsets, "max_seqlen": problem.seq}

    def elapsed_us(self) -> float:
        return self._timer.elapsed_us()


def in_turn(
    implementations: Mapping[str, peers.Implementation], rounds: int, drop: Callable[[str, str], None]
) -> dict[str, common.Timing]:
    """Times of one warm pass each a round.  drop(name, why): told of a baseline that ends on the way.

    Each round has an order of its own: at a GPU's power limit, who follows a large product is 3 % slower.
    """
    samples: dict[str, list[float]] = {name: [] for name in implementations}
    order = random.Random(0)
    for number in range(rounds + 2):
        for name in order.sample(list(samples), len(samples)):
            try:
                implementations[name].elapsed_us()
                elapsed = implementations[name].elapsed_us()
            except peers.PeerError as error:
                del samples[name]
                drop(name, str(error))
                continue
            if number >= 2:  # two rounds warm up
                samples[name].append(elapsed)
    return {name: common.summary(values) for name, values in samples.items()}


class Bench:
    """All implementations of one model; measures one problem after the other.  A context manager: it ends processes.

    problems: all that will be measured.  without, extra: baselines to leave out, and to take in, of PEERS.
    limit_s: see `peers.PeerProcess`.  device: "cuda", or "cpu" for tests.
    """

    def __init__(
        self, model: Model, problems: Sequence[Problem], *, without: Sequence[str] = (), extra: Sequence[str] = (),
        limit_s: float = 240.0, device: str = "cuda",
    ) -> None:  # fmt: skip
        self._model, self._device, self._problems = model, device, problems
        self._cki, self._sdpa = Cki(model, device), peers_torch.Sdpa(model, device)
        self._gemm = peers_torch.Gemm(model, device)
        self._peers: dict[str, peers.PeerProcess | peers.ShapeProcesses] = {}
        wanted = (
            peer for key, peer in PEERS.items() if key not in without and (key in extra or not peer.is_extra)
        )
        for peer in wanted:
            make = functools.partial(peers.PeerProcess, peer.factory, model, device, limit_s)
            self._peers[peer.name] = peers.ShapeProcesses(make, problems) if peer.by_shape else make()

    def __enter__(self) -> Bench:
        for peer in self._peers.values():
            peer.start()  # imports and weights take seconds, and cores that wait
        with ThreadPoolExecutor(1) as pool:
            # CKI's kernels, on the same device of the caller's, while the others compile theirs.
            built = pool.submit(contextvars.copy_context().run, self._build)
            for name, peer in self._peers.items():
                if isinstance(peer, peers.ShapeProcesses):
                    began = time.monotonic()
                    peer.prepare_all()
                    print(f"{name} prepared in {time.monotonic() - began:.0f} s", flush=True)
            built.result()
        return self

    def _build(self) -> None:
        for problem in self._problems:
            self._cki.build(problem)

    def __exit__(self, *error: object) -> None:
        self._cki.close()
        for peer in self._peers.values():
            peer.close()

    def measure(self, problem: Problem, rounds: int) -> Measured:
        """Checks and times all.  Raises SystemExit when CKI's output is wrong."""
        began = time.monotonic()
        truth = peers_torch.truth(self._model, problem, self._device)
        scale = float(np.abs(truth).max())

        def error_of(output: Array) -> float:
            """Largest, of the largest value; NaN where there is one."""
            return float(np.abs(output - truth).max()) / scale

        self._gemm.prepare(problem)
        errors = {
            SDPA: error_of(self._sdpa.prepare(problem)),
            CKI: error_of(self._cki.prepare(problem)),
        }
        if not errors[CKI] <= 2 * errors[SDPA] + 1e-5:
            raise SystemExit(f"{problem}: CKI's error is {errors[CKI]:.2e}, torch's {errors[SDPA]:.2e}")
        running: dict[str, peers.Implementation] = {SDPA: self._sdpa}

        def drop(name: str, why: str) -> None:
            print(f"  {name} left out: {why}", flush=True)

        packed_names = {peer.name for peer in PEERS.values() if peer.is_packed}
        names = [name for name in self._peers if not problem.lengths or name in packed_names]

        def prepare(name: str) -> Array | peers.PeerError:
            since = time.monotonic()
            try:
                output = self._peers[name].prepare(problem)
            except peers.PeerError as error:
                return error
            print(f"  {name}: {time.monotonic() - since:.0f} s", flush=True)
            return output

        with ThreadPoolExecutor(max(1, len(names))) as pool:  # each waits for a process
            outputs = dict(zip(names, pool.map(prepare, names)))
        for name, output in outputs.items():
            if isinstance(output, peers.PeerError):
                drop(name, str(output))
                continue
            errors[name] = error_of(output)
            if errors[name] <= 4 * errors[SDPA] + 1e-5:
                running[name] = self._peers[name]
            else:
                drop(name, f"its error is {errors[name]:.2e}, torch SDPA's {errors[SDPA]:.2e}")
        print(f"{problem}: prepared in {time.monotonic() - began:.0f} s", flush=True)
        timings = in_turn({**running, CKI: self._cki, GEMM: self._gemm}, rounds, drop)
        gemm_rate = self._gemm.flops / timings.pop(GEMM).median_us / 1e6
        flops = bert_model.flops(self._model, problem)
        return Measured(problem, timings, errors, gemm_rate, flops, self._cki.launches)


def problems_of(arguments: argparse.Namespace) -> list[Problem]:
    """What was asked for; without --packed, --batch and --seq-len, everything."""
    orders = [order == "pre" for order in arguments.order or ("pre", "post")]
    problems = []
    if not arguments.packed:
        problems += [
            Problem(arguments.batch or 4, seq, pre_ln)
            for pre_ln in orders
            for seq in arguments.seq_len or SEQ_LENS
        ]
    if arguments.packed or not (arguments.batch or arguments.seq_len):
        batch = arguments.batch or PACKED_BATCH
        problems += [bert_model.packed_problem(batch, pre_ln) for pre_ln in orders]
    return problems


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables and writes bert_large.csv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, help=f"sequences; default 4, packed {PACKED_BATCH}")
    parser.add_argument(
        "--seq-len", type=int, nargs="+", help=f"default {' '.join(map(str, SEQ_LENS))}; not for --packed"
    )
    parser.add_argument("--order", choices=("pre", "post"), action="append", help="of norms; default both")
    parser.add_argument("--packed", action="store_true", help="only batches of random lengths 32..512")
    parser.add_argument("--iters", type=int, default=30, help="timed passes of each implementation")
    parser.add_argument(
        "--without", choices=sorted(PEERS), action="append", default=[], help="leave a baseline out"
    )
    parser.add_argument(
        "--with", choices=[k for k, peer in PEERS.items() if peer.is_extra], action="append", default=[], dest="extra",
        help="take one more in; whole: torch.compile on all layers at once, which takes minutes",
    )  # fmt: skip
    parser.add_argument(
        "--prepare-only", action="store_true",
        help="let torch.compile fill TORCHINDUCTOR_CACHE_DIR for the next run; measures nothing",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=float, default=240.0, help="seconds for a baseline to prepare a problem"
    )
    parser.add_argument("--plan", action="store_true", help="print the launches of a layer; measures nothing")
    parser.add_argument(
        "--profile", action="store_true", help="print where the time of CKI's graph goes; compares nothing"
    )
    arguments = parser.parse_args(argv)
    if arguments.packed and arguments.seq_len:
        parser.error("--packed draws its lengths: no --seq-len")
    if min([arguments.iters, arguments.batch or 1, *(arguments.seq_len or ())]) < 1:
        parser.error("--iters, --batch and --seq-len are 1 or more")
    if arguments.plan:
        import bert_plan

        for seq in arguments.seq_len or SEQ_LENS:
            print(bert_plan.table(bert_model.BERT_LARGE, Problem(arguments.batch or 4, seq, True)))
        return
    common.require_gpu()
    if arguments.profile:
        import bert_profile

        ours = Cki(bert_model.BERT_LARGE, "cuda")
        for problem in problems_of(arguments):
            if not problem.lengths:
                print(bert_profile.profile(ours, bert_model.BERT_LARGE, problem), flush=True)
        bert_profile.leave()
    problems = problems_of(arguments)
    longest = max(problem.seq for problem in problems)
    model = bert_model.BERT_LARGE._replace(positions=max(bert_model.BERT_LARGE.positions, longest))
    measured: list[Measured] = []
    # A process for each shape compiles with torch's compiler, all at the same time, each with workers of its own.
    shapes = len({problem._replace(pre_ln=True) for problem in problems})
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // shapes)))
    options = {"without": arguments.without, "extra": arguments.extra, "limit_s": arguments.limit}
    with Bench(model, problems, **options) as bench:
        if arguments.prepare_only:
            return
        with contextlib.ExitStack() as shown:  # what was measured, also when something fails later
            shown.callback(lambda: bert_tables.report(measured))
            for problem in problems:
                measured.append(bench.measure(problem, arguments.iters))
                bert_tables.write(measured)
                print(bert_tables.line(measured[-1]), flush=True)


if __name__ == "__main__":
    main()
