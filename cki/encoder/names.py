"""Which weight of a state dict is which, by its name.

The names are those of Hugging Face's BERT and RoBERTa with any prefix ("bert.", "roberta.", "model.", ...), of their
TensorFlow and Flax twins ("tf_bert_model/bert/encoder/layer_._0/attention/self/query/kernel:0"), of Google's
checkpoints (".../layer_0/.../kernel", "LayerNorm/gamma"), and of their pre-LN relatives, RoBERTa-PreLayerNorm and
Megatron-BERT.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cki.ops.encoder_model import LAYER_MATRICES
from cki.problems import Problems

_WORDS = "embeddings.word_embeddings.weight"
_MODEL = {
    _WORDS: "words",
    "embeddings.position_embeddings.weight": "positions",
    "embeddings.token_type_embeddings.weight": "types",
    "embeddings.LayerNorm.weight": "embedding_gamma",
    "embeddings.LayerNorm.bias": "embedding_beta",
}
#: The last norm of a pre-LN model.
_FINAL = {
    "LayerNorm.weight": "final_gamma", "LayerNorm.bias": "final_beta",
    "encoder.ln.weight": "final_gamma", "encoder.ln.bias": "final_beta",
}  # fmt: skip
_LINEAR = {
    "attention.self.query": ("wq", "bq"), "attention.self.key": ("wk", "bk"), "attention.self.value": ("wv", "bv"),
    "attention.output.dense": ("wo", "bo"), "intermediate.dense": ("w1", "b1"), "output.dense": ("w2", "b2"),
}  # fmt: skip
#: Norms of a layer, and the block that each belongs to.
_NORMS = {
    "BERT": {"attention.output.LayerNorm": "attention", "output.LayerNorm": "output"},
    "RoBERTa-PreLayerNorm": {"attention.LayerNorm": "attention", "intermediate.LayerNorm": "output"},
    "Megatron": {"attention.ln": "attention", "ln": "output"},
}
_LAYER = re.compile(r"encoder\.layer\.(\d+)\.(.+)")
#: Parts of a checkpoint that the encoder's last hidden state does not depend on.
_OTHER_PARTS = (
    "pooler.", "cls.", "lm_head.", "classifier.", "qa_outputs.", "embeddings.position_ids", "embeddings.token_type_ids",
)  # fmt: skip


class NamedWeight(NamedTuple):
    """original: in the state dict.  name: as PyTorch has it.  is_kernel: named so, hence stored [in, out]."""

    original: str
    name: str
    is_kernel: bool


class NamedWeights(NamedTuple):
    """by_role: a weight for each name of `cki.ops.encoder_model.weight_names` that there is.  pre_names: whether norms
    have the names of a pre-LN model.  prefix: of the encoder's names."""

    by_role: dict[str, NamedWeight]
    layers: int
    pre_names: bool
    prefix: str


def find_names(
    names: Iterable[str], ignore: Sequence[str], pre_ln: bool | None, problems: Problems
) -> NamedWeights:
    """The encoder's weights among those names.  Notes what is unexpected, doubled, and missing.

    ignore: beginnings of names to leave out.  pre_ln: None is what the names say.
    """
    weights = [canonical(name) for name in names if not name.startswith(tuple(ignore))]
    prefix = _prefix(weights, problems)
    found: dict[str, NamedWeight] = {}
    style = "BERT"
    for weight in weights:
        if not weight.name.startswith(prefix):
            continue  # of another part of a larger model
        name = weight.name.removeprefix(prefix)
        role, found_style = _role(name)
        style = style if found_style in ("", "BERT") else found_style
        if role in found:
            problems.note(f"{weight.original} and {found[role].original} are the same weight")
        elif role:
            found[role] = weight
        elif not name.startswith(_OTHER_PARTS):
            problems.note(
                f"{weight.original} is unexpected",
                "ignore=(...) leaves weights out by the beginning of their names",
            )
    layers = 1 + max((int(role.split(".")[1]) for role in found if role.startswith("layers.")), default=-1)
    pre_names = style != "BERT" or "final_gamma" in found
    if pre_ln is False and pre_names:
        problems.note("pre_ln is False, but norms have the names of a pre-LN model")
    for name in _missing(found, layers, style, pre_names if pre_ln is None else pre_ln):
        problems.note(f"{prefix}{name} is missing")
    return NamedWeights(found, layers, pre_names, prefix)


def canonical(original: str) -> NamedWeight:
    """The name as PyTorch's classes have it."""
    name = original.replace("/", ".").removesuffix(":0")
    name = re.sub(r"\blayer_(?:\._)?(\d+)\b", r"layer.\1", name)
    stem, _, leaf = name.rpartition(".")
    if stem and leaf in ("kernel", "gamma", "scale", "embedding", "embeddings"):
        return NamedWeight(original, f"{stem}.weight", leaf == "kernel")
    if stem and leaf == "beta":
        return NamedWeight(original, f"{stem}.bias", False)
    if leaf.endswith("_embeddings"):  # Google's checkpoints
        return NamedWeight(original, f"{name}.weight", False)
    return NamedWeight(original, name, False)


def layout_of(weights: NamedWeights, problems: Problems) -> str:
    """How the matrices lie, by their names."""
    matrices = [w for role, w in weights.by_role.items() if role.rpartition(".")[2] in LAYER_MATRICES]
    kernels = [weight.original for weight in matrices if weight.is_kernel]
    others = [weight.original for weight in matrices if not weight.is_kernel]
    if kernels and others:
        problems.note(
            f"by its name {kernels[0]} is stored [in, out], {others[0]} [out, in]",
            "weight_layout= says which it is",
        )
    return "in_out" if kernels else "out_in"


def _prefix(weights: Sequence[NamedWeight], problems: Problems) -> str:
    """What stands before `embeddings.word_embeddings.weight`."""
    ends = re.compile(rf"(?:^|\.){re.escape(_WORDS)}$")
    found = [weight.name.removesuffix(_WORDS) for weight in weights if ends.search(weight.name)]
    if len(found) > 1:
        listed = ", ".join(repr(prefix) for prefix in found)
        problems.note(f"there are several encoders, with the prefixes {listed}", "the weights of one")
    return found[0] if found else ""


def _role(name: str) -> tuple[str, str]:
    """A weight's role, or "", and for a norm of a layer the kind of model that names it so."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _MODEL.get(name) or _FINAL.get(name, ""), ""
    number, (stem, _, leaf) = int(layer[1]), layer[2].rpartition(".")
    if leaf in ("weight", "bias"):
        if stem in _LINEAR:
            return f"layers.{number}.{_LINEAR[stem][leaf == 'bias']}", ""
        for style, norms in _NORMS.items():
            if stem in norms:
                return f"layers.{number}.{norms[stem]}_{'beta' if leaf == 'bias' else 'gamma'}", style
    return "", ""


def _missing(found: Mapping[str, NamedWeight], layers: int, style: str, pre_ln: bool) -> list[str]:
    """Names that should be there.  Token types are optional; a pre-LN model may do without the embeddings' norm and
    without a last one, but not without half of one."""
    expected = {role: name for name, role in _MODEL.items() if role != "types"}
    pairs = [("embedding_gamma", "embedding_beta")] if pre_ln else []
    for number in range(max(layers, 1)):
        start, role = f"encoder.layer.{number}.", f"layers.{number}."
        for stem, roles in _LINEAR.items():
            expected |= {role + roles[0]: f"{start}{stem}.weight", role + roles[1]: f"{start}{stem}.bias"}
        for stem, block in _NORMS[style].items():
            expected |= {
                f"{role}{block}_gamma": f"{start}{stem}.weight",
                f"{role}{block}_beta": f"{start}{stem}.bias",
            }
    if pre_ln:
        final = "encoder.ln" if style == "Megatron" else "LayerNorm"
        expected |= {"final_gamma": f"{final}.weight", "final_beta": f"{final}.bias"}
        pairs.append(("final_gamma", "final_beta"))
    absent = {role for pair in pairs if not found.keys() & set(pair) for role in pair}
    return [name for role, name in expected.items() if role not in found and role not in absent]
