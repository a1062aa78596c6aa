"""Whole models of texts and sounds; see `poptorch_models`, where they are registered."""

import math

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_models import Whole, whole_model

VOCABULARY = 11


def words(draw, rows, length):
    return draw.integers(1, VOCABULARY, rows, length)


def padded(draw, rows, length):
    """Words, of which the last ones of each row but not all may be 0."""
    lengths = draw.integers(2, length + 1, rows, 1)
    return torch.where(torch.arange(length) < lengths, words(draw, rows, length), 0)


@whole_model("encoder", lambda draw, rows: (padded(draw, rows, 6), draw.integers(0, 3, rows)))
class Encoder(Whole):
    """A classifier of texts that are padded to one length."""

    PLACES = ("embed", "encode", "head")
    LAYERS = ("embedding", "encoder.layers.0", "encoder.layers.1", "head")

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, ids, target=None):
        is_padding = ids == 0
        with self.at("embed"):
            x = self.embedding(ids) * math.sqrt(8)
        with self.at("encode"):
            x = self.encoder(x, src_key_padding_mask=is_padding)
        with self.at("head"):
            kept = ~is_padding[..., None]
            x = self.head((x * kept).sum(1) / kept.sum(1))
            return x if target is None else (x, functional.cross_entropy(x, target))


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


@whole_model(
    "transformer",
    lambda draw, rows: (words(draw, rows, 4), words(draw, rows, 3), words(draw, rows, 3)),
    num_inputs=2,
)
class Translator(Whole):
    """nn.Transformer; the encoder's result passes by the stages of the decoder."""

    PLACES = ("embed", "transform", "last")
    LAYERS = ("transformer.encoder", "transformer.decoder", "transformer.decoder.layers.0.linear2")

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, dim_feedforward=10, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, VOCABULARY)

    def forward(self, source, shifted, target=None):
        with self.at("embed"):
            x, y = self.embedding(source), self.embedding(shifted)
        with self.at("transform"):
            mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=y.dtype)
            y = self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True)
        with self.at("last"):
            y = self.last(y)
            return y if target is None else (y, functional.cross_entropy(y.transpose(1, 2), target))


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
    "gru translator",
    lambda draw, rows: (words(draw, rows, 4), words(draw, rows, 3), words(draw, rows, 3)),
    num_inputs=2,
)
class GruTranslator(Whole):
    """A cell step by step, with attention to what the encoder gave."""

    PLACES = ("embed", "encode", "decode", "last")
    LAYERS = ("encoder", "cell", "last")

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.encoder = nn.GRU(5, 6, batch_first=True)
        self.cell = nn.GRUCell(11, 6)
        self.last = nn.Linear(12, VOCABULARY)

    def forward(self, source, shifted, target=None):
        with self.at("embed"):
            x, y = self.embedding(source), self.embedding(shifted)
        with self.at("encode"):
            memory, hidden = self.encoder(x)
            hidden = hidden[0]
        with self.at("decode"):
            steps = []
            for position in range(y.size(1)):
                scores = torch.bmm(memory, hidden[:, :, None]).squeeze(2)
                seen = torch.einsum("bt,btd->bd", scores.softmax(1), memory)
                hidden = self.cell(torch.cat([y[:, position], seen], -1), hidden)
                steps.append(torch.cat([hidden, seen], -1))
        with self.at("last"):
            made = functional.log_softmax(self.last(torch.stack(steps, 1)), -1)
            if target is None:
                return made
            return made, functional.nll_loss(made.flatten(0, 1), target.flatten())


@whole_model(
    "speech",
    lambda draw, rows: (
        draw.normal(rows, 3, 16),
        draw.integers(6, 9, rows),
        draw.integers(1, 5, rows, 3),
        draw.integers(1, 4, rows),
    ),
    num_inputs=2,
)
class Speech(Whole):
    """Convolutions in time, whose weights are directions and lengths, and the CTC loss."""

    PLACES = ("first", "second", "head")
    LAYERS = ("first", "second", "norm", "head")

    def __init__(self):
        super().__init__()
        self.first = weight_norm(nn.Conv1d(3, 6, 5, stride=2, padding=2))
        self.second = nn.Conv1d(6, 12, 3, padding=2, dilation=2, groups=2)
        self.norm = nn.GroupNorm(3, 6)
        self.head = nn.Linear(6, 5)

    def forward(
        self,
        x,
        lengths,
        target=None,
        target_lengths=None,
    ):
        with self.at("first"):
            x = torch.tanh(self.first(x))
        with self.at("second"):
            x = self.norm(functional.glu(self.second(x), dim=1))
        with self.at("head"):
            x = self.head(x.permute(2, 0, 1)).log_softmax(-1)
            result = x.transpose(0, 1)
            if target is None:
                return result, lengths
            loss = functional.ctc_loss(x, target, lengths, target_lengths, zero_infinity=True)
            return result, loss


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

    def forward(
        self,
        ids,
        kinds,
        labels=None,
        follows=None,
    ):
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
