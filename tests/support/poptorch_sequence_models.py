"""Whole models of texts and sounds; see `poptorch_models`, where they are registered."""

import math

import torch
from torch import nn
from torch.nn import functional

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_models import Whole, whole_model

VOCABULARY = 11


def words(draw, rows, length):
    return draw.integers(1, VOCABULARY, rows, length)


def padded(draw, rows, length):
    """Words, of which the last ones of each row but not all may be 0."""
    lengths = draw.integers(2, length + 1, rows, 1)
    return torch.where(torch.arange(length) < lengths, words(draw, rows, length), 0)


class CausalLayer(nn.Module):
    """GPT's: norms first."""

    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.mix = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.wide, self.narrow = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        rows, length, size = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).reshape(rows, length, size))
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x)), approximate="tanh"))


@whole_model(
    "gpt",
    lambda draw, rows: (
        words(draw, rows, 5),
        words(draw, rows, 5).masked_fill_(draw.uniform(rows, 5) < 0.2, -100),
    ),
)
class Gpt(Whole):
    """The embedding is the last layer's weight: one variable of the first and of the last stage."""

    PLACES = ("embed", "layer0", "layer1", "last")
    LAYERS = ("layers.0", "layers.1", "layers.1.wide", "head")

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 5, 8))
        self.layers = nn.ModuleList([CausalLayer(8, 2), CausalLayer(8, 4)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, target=None):
        with self.at("embed"):
            x = self.embedding(ids) + self.positions
        for number, layer in enumerate(self.layers):
            with self.at(f"layer{number}"):
                x = layer(x)
        with self.at("last"):
            x = self.head(self.norm(x))
            if target is None:
                return x
            flat = x.view(-1, VOCABULARY)
            return x, functional.cross_entropy(flat, target.reshape(-1), ignore_index=-100)


@whole_model("lstm tagger", lambda draw, rows: (padded(draw, rows, 5), draw.integers(0, 3, rows, 5)))
class Tagger(Whole):
    """Both directions; tags of padding do not count, and others have weights."""

    PLACES = ("embed", "recur", "head")
    LAYERS = ("embedding", "lstm", "head")

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.lstm = nn.LSTM(4, 5, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)
        self.register_buffer("weights", torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, ids, target=None):
        with self.at("embed"):
            x = self.embedding(ids)
        with self.at("recur"):
            x, (last, _cell) = self.lstm(x)
        with self.at("head"):
            x = self.head(x).transpose(1, 2)
            result = {"logits": x, "tags": x.argmax(1), "last": last.transpose(0, 1)}
            if target is None:
                return result
            target = target.masked_fill(ids == 0, -100)
            return result, functional.cross_entropy(x, target, weight=self.weights)


@whole_model(
    "bert",
    lambda draw, rows: (
        padded(draw, rows, 6),
        draw.integers(0, 2, rows, 6),
        padded(draw, rows, 6),
        draw.integers(0, 2, rows),
    ),
    num_inputs=2,
    find_loss=lambda outputs: outputs["loss"],
)
class Bert(Whole):
    """Attention by hand, words masked out to be found again, and whether sentences follow each other."""

    PLACES = ("embed", "layer0", "layer1", "pool", "words")
    LAYERS = ("dropout", "layers.0", "layers.1", "pooler")

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(n, 8) for n in (VOCABULARY, 6, 2)])
        self.norm, self.dropout = nn.LayerNorm(8, eps=1e-12), nn.Dropout(0.0)
        self.layers = nn.ModuleList([self.make_layer(), self.make_layer()])
        self.pooler, self.follows = nn.Linear(8, 8), nn.Linear(8, 2)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.register_buffer("position_ids", torch.arange(6)[None])

    @staticmethod
    def make_layer():
        return nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})

    def attend(self, layer, x, mask):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in layer["qkv"](x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(4) + mask, -1)
        return layer["norm"](x + layer["out"]((weights @ v).transpose(1, 2).flatten(2)))

    def forward(self, ids, kinds, labels=None, follows=None):
        with self.at("embed"):
            parts = zip(self.embeddings, (ids, self.position_ids, kinds), strict=True)
            x = self.dropout(self.norm(sum(embedding(numbers) for embedding, numbers in parts)))
            mask = (1.0 - (ids > 0)[:, None, None, :].to(x.dtype)) * -10000.0
        for number, layer in enumerate(self.layers):
            with self.at(f"layer{number}"):
                x = self.attend(layer, x, mask)
        with self.at("pool"):
            pooled = torch.tanh(self.pooler(x[:, 0]))
            relation = self.follows(pooled)
        with self.at("words"):
            logits = functional.linear(x, self.embeddings[0].weight, self.bias)
            outputs = {"logits": logits, "pooled": pooled}
            if labels is None or follows is None:
                return outputs
            of_words = functional.cross_entropy(logits.transpose(1, 2), labels)
            loss = of_words + functional.cross_entropy(relation, follows)
            return {"loss": poptorch.identity_loss(loss, reduction="sum"), **outputs}
