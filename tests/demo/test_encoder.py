"""The encoder's results: known values, the float64 reference, and the kernels on each device and in each dtype."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from cki.demo import SENTENCES, minilm, show
from cki.demo.place import Place
from tests.demo import plain_encoder

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(minilm.PACKAGE) is None, reason="the weights package is not installed"
)

#: Cosine similarities of SENTENCES and the first components of their embeddings, from `plain_encoder`.
SIMILARITY = np.array(
    [
        [1.0, 0.6632403, -0.04009329, -0.00134808, 0.10518112, 0.04726253],
        [0.6632403, 1.0, -0.0608389, -0.09952235, 0.07287178, 0.10523088],
        [-0.04009329, -0.0608389, 1.0, 0.61550164, 0.03775261, -0.01297393],
        [-0.00134808, -0.09952235, 0.61550164, 1.0, -0.02816604, -0.05698319],
        [0.10518112, 0.07287178, 0.03775261, -0.02816604, 1.0, 0.69064159],
        [0.04726253, 0.10523088, -0.01297393, -0.05698319, 0.69064159, 1.0],
    ]
)
COMPONENTS = np.array(
    [
        [0.09173912, 0.07234464, -0.0049738],
        [0.00200697, 0.02523509, -0.02636997],
        [0.06054433, 0.03113664, 0.07465272],
        [0.03330945, -0.06020988, 0.09206414],
        [0.06142987, 0.02598878, -0.03916629],
        [-0.07240866, 0.00617705, 0.00522715],
    ]
)

#: Largest error of a component of a unit vector: float32 keeps seven digits through six layers; half precision
#: rounds each of about 50 intermediate tensors to 11 bits (f16) or 8 bits (bf16).
BOUNDS = {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}


@pytest.fixture(scope="module")
def model():
    return minilm.load()


@pytest.fixture(scope="module")
def tokens(model):
    return model.tokenize(SENTENCES)


@pytest.fixture(scope="module")
def exact(tokens):
    """Embeddings by a forward pass that shares nothing with CKI."""
    file = minilm.model_folder() / "model.safetensors"
    return np.stack(
        [plain_encoder.embed(file, ids[:length].tolist()) for ids, length in zip(tokens.ids, tokens.lengths)]
    )


def test_plain_forward_gives_the_known_values(exact):
    np.testing.assert_allclose(exact @ exact.T, SIMILARITY, atol=1e-7)
    np.testing.assert_allclose(exact[:, :3], COMPONENTS, atol=1e-7)


def test_paraphrases_are_near_and_the_rest_is_far():
    pairs = np.arange(6) // 2
    same = (pairs[:, None] == pairs[None, :]) & ~np.eye(6, dtype=bool)
    assert SIMILARITY[same].min() > 0.6
    assert SIMILARITY[pairs[:, None] != pairs[None, :]].max() < 0.3


def test_reference_forward_is_the_plain_forward(model, tokens, exact):
    np.testing.assert_allclose(show.embed_reference(model, tokens), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_kernels_agree_with_the_plain_forward(device, model, tokens, exact, dtype):
    embedded = show.embed(model, tokens, Place(device.info), dtype)
    error = np.abs(embedded.vectors - exact).max()
    assert error <= BOUNDS[dtype], f"{error:.2e}"
    np.testing.assert_allclose(np.linalg.norm(embedded.vectors, axis=1), 1.0, atol=BOUNDS[dtype] * 4)
    assert embedded.launches >= 6 * 6  # at least six kernels a layer: none of them is left to NumPy


def test_batching_does_not_matter(device, model, exact):
    """One sentence alone has the vector that it has among longer ones, whose padding it carries."""
    alone = show.embed(model, model.tokenize(SENTENCES[1:2]), Place(device.info), "f32")
    assert np.abs(alone.vectors[0] - exact[1]).max() <= BOUNDS["f32"]
