"""Models of transformers, of small configurations, and plain torch to compare with.

Nothing is downloaded: configurations are made here, and weights are drawn.
"""

import copy
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once

import torch
import transformers

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_front import join, make_options

transformers.logging.set_verbosity_error()  # it tells of tokens and caches that small models do not have

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 20,
}
BASE = {**SMALL, **NO_DROPOUT}
NARROW = {"hidden_size": 8, "intermediate_size": 8}
LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label")
LENGTH = 12


class PipelinedBert(transformers.BertForQuestionAnswering):
    """As people's programs wrap it: tuples come out, and the loss goes through identity_loss."""

    def forward(self, input_ids, attention_mask, token_type_ids, start_positions=None, end_positions=None):
        ends = {"start_positions": start_positions, "end_positions": end_positions}
        output = super().forward(input_ids, attention_mask, token_type_ids, **ends)
        if start_positions is None:
            return output.start_logits, output.end_logits
        loss = poptorch.identity_loss(output.loss, reduction="none")
        return loss, output.start_logits, output.end_logits


def make_bert(kind=transformers.BertForQuestionAnswering, seed=0, **values):
    """A BERT, with layers 0, 2 and 4 at the begin of a block, as in the user guide's listing 8."""
    model = drawn(lambda: kind(transformers.BertConfig(**{**BASE, "num_hidden_layers": 6, **values})), seed)
    return begin_blocks(model, [f"layer.{n}" for n in range(0, model.config.num_hidden_layers, 2)])


def begin_blocks(model, names):
    """Begins a block at each module, the first one whose path ends with a name."""
    for number, name in enumerate(names):
        path = next(path for path, _module in model.named_modules() if f".{path}".endswith(f".{name}"))
        poptorch.BeginBlock(model.get_submodule(path), ipu_id=number + 1)
    return model


def drawn(make, seed=0):
    """A model whose weights are drawn anew: biases of 0 would hide what is wrong with them."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.normal_(centre, 0.2)
    return model


def _tokens(rows, seed):
    """Ids of tokens; the last three of each second row are padding."""
    ids = torch.randint(1, 40, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[1::2, 9:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def questions(rows, seed):
    """A batch for question answering: the first half are questions."""
    inputs = _tokens(rows, seed)
    types = torch.zeros(rows, LENGTH, dtype=torch.long)
    types[:, LENGTH // 2 :] = 1
    start, end = torch.randint(0, 9, (2, rows), generator=torch.Generator().manual_seed(seed + 1))
    return {**inputs, "token_type_ids": types, "start_positions": start, "end_positions": end}


def questions_alone(rows, seed):
    return {name: value for name, value in questions(rows, seed).items() if name != "token_type_ids"}


def masked(rows, seed):
    """A batch with a label for two tokens in three."""
    inputs = _tokens(rows, seed)
    labels = inputs["input_ids"].clone()
    labels[:, ::3] = -100
    return {**inputs, "labels": labels}


def sequences(rows, seed):
    """A batch for an encoder and a decoder."""
    batch = masked(rows, seed)
    return {**batch, "decoder_input_ids": batch["input_ids"].roll(1, dims=1)}


def pairs(rows, seed):
    return {**masked(rows, seed), "next_sentence_label": torch.arange(rows) % 2}


def classes(rows, seed):
    return {**_tokens(rows, seed), "labels": (torch.arange(rows) + seed) % 3}


def images(rows, seed):
    pixels = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "labels": (torch.arange(rows) + seed) % 3}


def sounds(rows, seed):
    values = torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed))
    return {"input_values": values, "labels": (torch.arange(rows) + seed) % 3}


def cast(batch, dtype):
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}


def of_micro_batches(batch, number):
    """The micro-batches of a batch, each a dict as the batch is."""
    parts = {name: tensor.chunk(number) for name, tensor in batch.items()}
    return [{name: part[index] for name, part in parts.items()} for index in range(number)]


def loss_of(output):
    return output[0] if isinstance(output, tuple) else output["loss"]


class Trained:
    """A model that trains on devices, and a copy of it that trains in plain torch; batches are dicts."""

    def __init__(self, model, make_batch, make_optimizers=None, rows=2, accumulation=4):
        """Wraps it.

        Args:
          model: of transformers.
          make_batch: from the number of rows and a seed to a dict of tensors.
          make_optimizers: from a model to an optimizer; two, the first PopTorch's. None: SGD with momentum.
          rows: of a micro-batch.
          accumulation: micro-batches of an update.
        """
        ours, theirs = make_optimizers or (make_sgd, make_plain_sgd)
        self.model, self.plain = model, copy.deepcopy(model)
        self.make_batch, self.rows, self.accumulation = make_batch, rows, accumulation
        self.executor = poptorch.trainingModel(model, make_options(1, accumulation), ours(model))
        self.plain_optimizer = theirs(self.plain)
        self.dtype = next(model.parameters()).dtype

    def step(self, seed):
        """One update of both; returns what each call gave: of the micro-batches, joined, in plain torch."""
        batch = cast(self.make_batch(self.rows * self.accumulation, seed), self.dtype)
        output = self.executor(**batch)
        self.plain_optimizer.zero_grad()
        made = []
        for part in of_micro_batches(batch, self.accumulation):
            made.append(self.plain(**part))
            (loss_of(made[-1]) / self.accumulation).backward()
        self.plain_optimizer.step()
        return output, join(made)


def make_sgd(model):
    return poptorch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, use_combined_accum=False)


def make_plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def inputs_of(batch):
    """A batch without what only training takes."""
    return {name: value for name, value in batch.items() if name not in LABELS}


# Other models: how each is made, its batches, and where blocks begin.
def _config(kind, **values):
    return getattr(transformers, f"{kind}Config")(**values)


_GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 40, "n_positions": 16}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "vocab_size": 40, "dropout": 0.0}
_DISTIL |= {"max_position_embeddings": 20, "attention_dropout": 0.0, "qa_dropout": 0.0}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
_T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
_BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
_BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 40}
_BART |= {"max_position_embeddings": 20, "dropout": 0.0}
_LLAMA = {**SMALL, "num_key_value_heads": 1}
_EXPERTS = {**_LLAMA, "num_experts_per_tok": 2}
_QWEN = {**_EXPERTS, "num_experts": 5, "moe_intermediate_size": 12, "head_dim": 8}
_VIT = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16}
_VIT |= {"num_hidden_layers": 2, "patch_size": 4, "num_labels": 3, **NO_DROPOUT}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
_DEBERTA = {**BASE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_MOBILE = {**BASE, "embedding_size": 16, "intra_bottleneck_size": 16}
_MOBILE |= {"num_feedforward_networks": 1}
_WAV2VEC2 = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": (8, 8)}
_WAV2VEC2 |= {"conv_stride": (4, 2), "conv_kernel": (8, 3), "num_conv_pos_embeddings": 4, "num_labels": 3}
_WAV2VEC2 |= {"num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
_WAV2VEC2 |= {"activation_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0}
_WAV2VEC2 |= {"apply_spec_augment": False, "num_hidden_layers": 2}
OTHERS = {
    "BertForMaskedLM": (_config("Bert", **BASE), masked, ["cls"]),
    "BertForPreTraining": (_config("Bert", **BASE), pairs, ["layer.1"]),
    "BertForTokenClassification": (_config("Bert", **BASE, num_labels=40), masked, ["layer.1"]),
    "DistilBertForQuestionAnswering": (_config("DistilBert", **_DISTIL), questions_alone, ["layer.1"]),
    "RobertaForSequenceClassification": (_config("Roberta", **BASE, num_labels=3), classes, ["layer.1"]),
    "AlbertForQuestionAnswering": (_config("Albert", **BASE, embedding_size=8), questions, []),
    "ElectraForQuestionAnswering": (_config("Electra", **BASE, embedding_size=8), questions, ["layer.1"]),
    "DebertaV2ForQuestionAnswering": (_config("DebertaV2", **_DEBERTA), questions, ["layer.1"]),
    "MobileBertForQuestionAnswering": (_config("MobileBert", **_MOBILE), questions, ["layer.1"]),
    "GPT2LMHeadModel": (_config("GPT2", **_GPT2), masked, ["h.1", "h.2", "h.3"]),
    "LlamaForCausalLM": (_config("Llama", **_LLAMA), masked, ["layers.1"]),
    "MixtralForCausalLM": (_config("Mixtral", **_EXPERTS, num_local_experts=4), masked, ["layers.1"]),
    "Qwen3MoeForCausalLM": (_config("Qwen3Moe", **_QWEN), masked, ["layers.1"]),
    "T5ForConditionalGeneration": (_config("T5", **_T5), sequences, ["decoder"]),
    "BartForConditionalGeneration": (_config("Bart", **_BART), sequences, ["decoder"]),
    "ViTForImageClassification": (_config("ViT", **_VIT), images, ["layers.1"]),
    "ResNetForImageClassification": (_config("ResNet", **_RESNET), images, ["stages.1"]),
    "Wav2Vec2ForSequenceClassification": (_config("Wav2Vec2", **_WAV2VEC2), sounds, ["layers.1"]),
}


def make_other(name, seed=0):
    """One of `OTHERS`: the model, with its blocks, and what makes its batches."""
    config, make_batch, places = OTHERS[name]
    model = drawn(lambda: getattr(transformers, name)(config), seed)
    return begin_blocks(model, places), make_batch
