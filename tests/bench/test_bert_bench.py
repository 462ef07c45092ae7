"""bench/bert_large.py on a tiny encoder: CKI on the simulated device, the baselines on the CPU."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest

import cki

pytestmark = pytest.mark.torch


@pytest.fixture
def bert(script):
    return script("bert_large")


@pytest.fixture
def tiny(bert):
    return bert.Model(layers=2, hidden=32, heads=2, inner=64, vocabulary=50, positions=24)


def problems(bert):
    return [
        bert.Problem(2, 17, True),
        bert.Problem(2, 17, False),
        bert.Problem(3, 20, True, (20, 3, 9)),
        bert.Problem(3, 20, False, (20, 3, 9)),
    ]


@pytest.fixture
def measured(bert, tiny):
    with (
        cki.device("sim"),
        bert.Bench(tiny, problems(bert), without=list(bert.PEERS), device="cpu") as bench,
    ):
        return [bench.measure(problem, 1) for problem in problems(bert)]


def test_all_compute_the_same_encoder(bert, tiny, measured, monkeypatch):
    for one in measured:
        assert set(one.timings) == set(one.errors) == {"cki", "torch SDPA"}
        assert all(0 < error < 4e-3 for error in one.errors.values())
        assert all(timing.median_us > 0 for timing in one.timings.values())
    embeddings, final = 2, 1
    assert [one.launches for one in measured] == [
        embeddings + 2 * 7 + final, embeddings + 2 * 7,
        embeddings + 1 + 2 * 7 + final, embeddings + 1 + 2 * 7,  # positions by offsets
    ]  # fmt: skip


@pytest.mark.gpu
def test_on_a_gpu(bert, tiny):
    """The same from graphs."""
    with bert.Bench(tiny, problems(bert), without=list(bert.PEERS), device="cuda") as bench:
        for problem in problems(bert):
            one = bench.measure(problem, 2)
            assert set(one.timings) == {"cki", "torch SDPA"}
            assert all(0 < error < 4e-3 for error in one.errors.values())


def test_torch_compile_computes_it_too(bert, tiny, monkeypatch):
    """It compiles two functions a problem, the embeddings and a layer, however many layers there are."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch_peers = bert.peers_torch
    monkeypatch.setattr(torch_peers.Compiled, "options", {"backend": backend})
    compiled = torch_peers.Compiled(tiny, "cpu")
    for problem in problems(bert)[::3]:
        truth = torch_peers.truth(tiny, problem, "cpu")
        assert truth.shape == (problem.tokens, tiny.hidden)
        graphs.clear()
        assert np.abs(compiled.prepare(problem) - truth).max() < 4e-3 * np.abs(truth).max()
        assert compiled.elapsed_us() > 0
        assert len(graphs) == 2
    graphs.clear()
    whole = torch_peers.CompiledWhole(tiny, "cpu")
    assert np.abs(whole.prepare(problem) - truth).max() < 4e-3 * np.abs(truth).max()
    assert len(graphs) == 1


@pytest.mark.tensorflow
@pytest.mark.parametrize(("factory", "which"), [("tf_function", slice(0, None, 3)), ("tf_xla", slice(1, 3))])
def test_tensorflow_computes_it_too(bert, tiny, factory, which):
    """Both with padding and without, and with norms before and behind the blocks."""
    import peers_tensorflow

    peer = getattr(peers_tensorflow, factory)(tiny, "cpu")
    for problem in problems(bert)[which]:
        truth = bert.peers_torch.truth(tiny, problem, "cpu")
        assert np.abs(peer.prepare(problem) - truth).max() < 4e-3 * np.abs(truth).max()
        assert peer.elapsed_us() > 0


@pytest.mark.tensorflow
def test_cki_in_a_keras_model_computes_it_too(bert, tiny):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras runs on another backend")
    import peers_keras

    peer = peers_keras.keras_function(tiny, "cpu")
    for problem in problems(bert)[::3]:
        truth = bert.peers_torch.truth(tiny, problem, "cpu")
        assert np.abs(peer.prepare(problem) - truth).max() < 4e-3 * np.abs(truth).max()
        assert peer.elapsed_us() > 0


def test_the_order_of_norms_and_the_weights_matter(bert, tiny):
    pre, post = (bert.peers_torch.truth(tiny, bert.Problem(2, 5, order), "cpu") for order in (True, False))
    assert np.abs(pre - post).max() > 0.1
    weights = bert.bert_model.state_dict(tiny)
    assert all(np.isfinite(value).all() and value.std() > 0.05 for value in weights.values())


def test_a_wrong_result_ends_the_program(bert, tiny, monkeypatch):
    right = bert.Cki.prepare
    monkeypatch.setattr(bert.Cki, "prepare", lambda self, problem: right(self, problem) * 1.01)
    with cki.device("sim"), bert.Bench(tiny, problems(bert), without=list(bert.PEERS), device="cpu") as bench:
        with pytest.raises(SystemExit, match="CKI's error is"):
            bench.measure(bert.Problem(2, 5, True), 1)


def test_tables(bert, tmp_path, monkeypatch, capsys):
    timing = bert.common.Timing
    times = [{"torch SDPA": 12000.0, "TF XLA": 30000.0, "cki": 10000.0}, {"torch SDPA": 900.0, "cki": 1000.0}]
    cases = [bert.Problem(4, 2048, True), bert.bert_model.packed_problem(8, False)]
    found = [
        bert.Measured(problem, {n: timing(t, t, t) for n, t in by.items()}, dict.fromkeys(by, 1e-3), 700.0, 6e12, 171)
        for problem, by in zip(cases, times)
    ]  # fmt: skip
    first, second = bert.bert_tables.time_table(found)
    assert (first["cki ms"], first["vs torch SDPA"], first["vs TF XLA"]) == ("10.000", "1.20x", "3.00x")
    assert first["vs best torch"] == "1.20x"
    assert (second["vs torch SDPA"], second["TF XLA ms"]) == ("0.90x", "-")
    first, second = bert.bert_tables.token_table(found)
    assert (first["cki tokens/s"], first["gain on TF XLA"]) == ("819,200", "+200%")
    assert second["gain on torch SDPA"] == "-10%"
    # 6 TFLOP in 10 ms are 600 TFLOP/s.
    assert bert.bert_tables.rate_table(found)[0]["share"] == f"{600 / 700:.3f}"
    assert "cki 10.000 ms, torch SDPA 12.000 (1.20x), TF XLA" in bert.bert_tables.line(found[0])
    monkeypatch.setenv("BENCH_OUT", str(tmp_path))
    bert.bert_tables.report(found)
    with (tmp_path / "bert_large.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["implementation"] for row in rows] == ["torch SDPA", "TF XLA", "cki", "torch SDPA", "cki"]
    assert rows[2]["tokens_per_s"] == "819200" and rows[2]["launches"] == "171"
    assert "throughput and gain" in capsys.readouterr().out
    bert.bert_tables.report([])  # nothing measured, nothing written


def test_flops(bert):
    """275 GFLOP a layer at 4 x 2048."""
    model = bert.bert_model.BERT_LARGE
    total = bert.bert_model.flops(model, bert.Problem(4, 2048, True))
    assert total == 24 * (2 * 8192 * (4 * 1024**2 + 2 * 1024 * 4096) + 4 * 4 * 2048**2 * 1024)
    assert math.isclose(total / 24, 275e9, rel_tol=2e-3)
    one = bert.bert_model.flops(model, bert.Problem(1, 512, True, (512,)))
    assert one == bert.bert_model.flops(model, bert.Problem(1, 512, True))


def test_packed_batches(bert):
    problem = bert.bert_model.packed_problem(64, True)
    assert len(problem.lengths) == 64 and problem.seq == max(problem.lengths)
    assert 32 <= min(problem.lengths) < 64 and 448 < problem.seq <= 512
    assert (
        bert.bert_model.offsets(problem)[-1] == problem.tokens == bert.bert_model.kept_tokens(problem).sum()
    )


def test_what_is_measured(bert, monkeypatch, capsys):
    asked, written = [], []

    class Fake:
        def __init__(self, model, problems, **options):
            asked.append((model.positions, len(problems), options))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def measure(self, problem, rounds):
            asked.append((problem, rounds))

    monkeypatch.setattr(bert, "Bench", Fake)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    monkeypatch.setattr(bert.common, "require_gpu", lambda: None)
    monkeypatch.setattr(bert.bert_tables, "report", lambda measured: None)
    monkeypatch.setattr(bert.bert_tables, "write", lambda measured: written.append(len(measured)))
    monkeypatch.setattr(bert.bert_tables, "line", lambda one: "")
    bert.main(["--batch", "4", "--seq-len", "2048", "--iters", "50", "--without", "compile"])
    assert asked[0] == (4096, 2, {"without": ["compile"], "extra": [], "limit_s": 240.0})
    assert asked[1:] == [(bert.Problem(4, 2048, True), 50), (bert.Problem(4, 2048, False), 50)]
    assert written == [1, 2]  # after each problem
    asked.clear()
    bert.main(["--packed", "--batch", "8", "--order", "post"])
    assert asked[1:] == [(bert.bert_model.packed_problem(8, False), 30)]
    asked.clear()
    bert.main(["--packed", "--prepare-only", "--with", "whole"])
    assert [options["extra"] for _, _, options in asked] == [["whole"]]
    asked.clear()
    bert.main([])
    assert len(asked) == 1 + 2 * (5 + 1)
    for wrong in (["--packed", "--seq-len", "4"], ["--iters", "0"], ["--seq-len", "0"]):
        with pytest.raises(SystemExit):
            bert.main(wrong)
    capsys.readouterr()


# --- baselines in processes of their own ------------------------------------------------------------------------------

FAKES = """
import os, time
import numpy as np

class Good:
    def __init__(self, model, device):
        self.count = 0
    def prepare(self, problem):
        if problem.batch == 13:
            raise RuntimeError("out of\\nmemory")
        if problem.batch == 14:
            time.sleep(60)
        if problem.batch == 15:
            os._exit(3)
        return np.full((problem.tokens, 2), os.getpid(), np.float32)
    def elapsed_us(self):
        self.count += 1
        return float(self.count)

def absent(model, device):
    raise ImportError("TensorFlow sees no GPU")
"""


@pytest.fixture
def process(bert, tiny, tmp_path, monkeypatch):
    (tmp_path / "fake_peers.py").write_text(FAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(factory="fake_peers:Good", limit_s=30.0):
        made.append(bert.peers.PeerProcess(factory, tiny, "cpu", limit_s))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


def test_a_peer_answers_in_turn(bert, process):
    peer = process()
    first = peer.prepare(bert.Problem(2, 3, True))
    assert first.shape == (6, 2)
    timings = bert.in_turn({"peer": peer}, 3, lambda name, why: pytest.fail(why))
    assert timings["peer"].median_us == 8.0  # every second answer, after two rounds: 6, 8, 10
    assert (peer.prepare(bert.Problem(1, 1, True)) == first[:1]).all()  # the same process


def test_a_failure_costs_one_problem(bert, process):
    peer = process()
    with pytest.raises(bert.peers.PeerError, match="RuntimeError: out of memory"):
        peer.prepare(bert.Problem(13, 1, True))
    with pytest.raises(bert.peers.PeerError, match="its process died"):
        peer.prepare(bert.Problem(15, 1, True))
    assert peer.prepare(bert.Problem(1, 1, True)).shape == (1, 2)
    peer.close()
    dropped = []
    assert bert.in_turn({"peer": peer}, 1, lambda *why: dropped.append(why)) == {}
    assert dropped == [("peer", "not prepared")]


def test_a_time_limit(bert, process):
    peer = process(limit_s=1.5)
    with pytest.raises(bert.peers.PeerError, match="not done within 2 s"):
        peer.prepare(bert.Problem(14, 1, True))


def test_what_cannot_be_imported_is_tried_once(bert, process):
    peer = process("fake_peers:absent")
    for _ in range(2):
        with pytest.raises(bert.peers.PeerError, match="ImportError: TensorFlow sees no GPU"):
            peer.prepare(bert.Problem(1, 1, True))
        assert peer._process is None


def test_shapes_are_prepared_at_the_same_time(bert, process):
    """Each in a process, which is asked again for what it has prepared; a failure is told when it is asked for."""
    good, bad = (
        [bert.Problem(2, 3, True), bert.Problem(2, 3, False), bert.Problem(1, 3, True)],
        bert.Problem(13, 1, True),
    )
    peer = bert.peers.ShapeProcesses(process, [*good, bad])
    with pytest.raises(bert.peers.PeerError, match="not prepared"):
        peer.elapsed_us()
    peer.start()
    peer.prepare_all()
    first, second, other = (peer.prepare(problem) for problem in good)
    assert (first == second).all() and first[0, 0] != other[0, 0]
    assert peer.elapsed_us() == 1.0
    with pytest.raises(bert.peers.PeerError, match="out of memory"):
        peer.prepare(bad)
    peer.close()


def test_processes_keep_their_times_together(bert):
    """Inductor's file of times is written with what others wrote while one process measured."""

    class Cache:
        file = {"addmm": {"a": {"highest": {"triton": 1.0}}}}  # noqa: RUF012

        def get_local_cache(self):
            return self.file

        def write(self, times):
            self.file = times

    cache = Cache()
    mine = {"addmm": {"a": {"highest": {"triton": 2.0}}, "b": {"highest": {"triton": 3.0}}}, "mm": {}}
    Cache.file["addmm"]["c"] = {"highest": {"triton": 4.0}}
    bert.peers_torch._merge_times(cache, Cache.write, mine)
    products = cache.file["addmm"]
    assert {key: value["highest"]["triton"] for key, value in products.items()} == {"a": 2, "b": 3, "c": 4}
    assert cache.file["mm"] == {}
