"""BERT, RoBERTa and RoBERTa-PreLayerNorm as Hugging Face's classes compute them, in plain torch, and random weights.

Modules have the names of transformers' BertModel, RobertaModel and RobertaPreLayerNormModel, so that a state dict fits
both.  Nothing here comes from CKI: this is what its encoder is compared with.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

#: config.json of a small model, as Hugging Face writes it.
CONFIG = {
    "model_type": "bert", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 80,
    "vocab_size": 97, "max_position_embeddings": 40, "type_vocab_size": 2, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "pad_token_id": 0, "position_embedding_type": "absolute",
}  # fmt: skip
ROBERTA = {**CONFIG, "model_type": "roberta", "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
PRE_LN = {**ROBERTA, "model_type": "roberta-prelayernorm"}


class _Embeddings(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.position_embeddings = nn.Embedding(c["max_position_embeddings"], c["hidden_size"])
        self.token_type_embeddings = nn.Embedding(c["type_vocab_size"], c["hidden_size"])
        self.LayerNorm = nn.LayerNorm(c["hidden_size"], eps=c["layer_norm_eps"])

    def forward(self, ids, types, positions):
        rows = (
            self.word_embeddings(ids)
            + self.token_type_embeddings(types)
            + self.position_embeddings(positions)
        )
        return self.LayerNorm(rows)


class _Self(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c["num_attention_heads"]
        self.query, self.key, self.value = (nn.Linear(c["hidden_size"], c["hidden_size"]) for _ in range(3))

    def forward(self, x, mask):
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class _Output(nn.Module):
    """attention.output or output: a product, and after the addition a norm (not in a pre-LN model)."""

    def __init__(self, c, width, norm):
        super().__init__()
        self.dense = nn.Linear(width, c["hidden_size"])
        if norm:
            self.LayerNorm = nn.LayerNorm(c["hidden_size"], eps=c["layer_norm_eps"])


class _Attention(nn.Module):
    def __init__(self, c, pre):
        super().__init__()
        self.self = _Self(c)
        self.output = _Output(c, c["hidden_size"], not pre)
        if pre:
            self.LayerNorm = nn.LayerNorm(c["hidden_size"], eps=c["layer_norm_eps"])


class _Intermediate(nn.Module):
    def __init__(self, c, pre):
        super().__init__()
        self.dense = nn.Linear(c["hidden_size"], c["intermediate_size"])
        if pre:
            self.LayerNorm = nn.LayerNorm(c["hidden_size"], eps=c["layer_norm_eps"])


class _Layer(nn.Module):
    def __init__(self, c, pre):
        super().__init__()
        self.pre = pre
        self.attention = _Attention(c, pre)
        self.intermediate = _Intermediate(c, pre)
        self.output = _Output(c, c["intermediate_size"], not pre)
        self.act = {
            "gelu": nn.functional.gelu, "relu": nn.functional.relu,
            "gelu_new": lambda x: nn.functional.gelu(x, approximate="tanh"),
        }[c["hidden_act"]]  # fmt: skip

    def forward(self, x, mask):
        attention, output = self.attention, self.output
        if self.pre:
            x = x + attention.output.dense(attention.self(attention.LayerNorm(x), mask))
            return x + output.dense(self.act(self.intermediate.dense(self.intermediate.LayerNorm(x))))
        x = attention.output.LayerNorm(attention.output.dense(attention.self(x, mask)) + x)
        return output.LayerNorm(output.dense(self.act(self.intermediate.dense(x))) + x)


class _Stack(nn.Module):
    def __init__(self, c, pre):
        super().__init__()
        self.layer = nn.ModuleList(_Layer(c, pre) for _ in range(c["num_hidden_layers"]))


class Model(nn.Module):
    """BertModel, RobertaModel or RobertaPreLayerNormModel without its pooler, by config["model_type"]."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        pre = config["model_type"] == "roberta-prelayernorm"
        self.embeddings = _Embeddings(config)
        self.encoder = _Stack(config, pre)
        if pre:
            self.LayerNorm = nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, position_ids=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        positions = position_ids
        if positions is None and self.config["model_type"] == "bert":
            positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        elif positions is None:  # create_position_ids_from_input_ids
            padding = self.config["pad_token_id"]
            real = (input_ids != padding).int()
            positions = (torch.cumsum(real, dim=1) * real).long() + padding
        x = self.embeddings(input_ids, types, positions)
        for layer in self.encoder.layer:
            x = layer(x, mask.bool())
        return self.LayerNorm(x) if hasattr(self, "LayerNorm") else x


def random_model(config, seed=0):
    """A float64 model of random weights that are exact in every 16-bit type's range, and its NumPy state dict."""
    generator = torch.Generator().manual_seed(seed)
    model = Model(config).double().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = (
                1.0
                if "embeddings" in name and value.ndim == 2
                else 0.3
                if value.ndim == 1
                else value.shape[1] ** -0.5
            )
            value.copy_(torch.randn(value.shape, generator=generator) * scale)
            if "LayerNorm.weight" in name:
                value += 1
            if "query.weight" in name:
                value *= 3  # so that the softmax is not nearly uniform
            value.copy_(value.half().bfloat16().double())
    return model, {name: value.numpy() for name, value in model.state_dict().items()}


def forward(model, ids, mask=None, types=None, positions=None):
    """The last hidden state as NumPy, in the model's own type."""
    with torch.no_grad():
        arrays = [
            None if a is None else torch.from_numpy(np.ascontiguousarray(a)).long()
            for a in (ids, mask, types, positions)
        ]
        return model(*arrays)
