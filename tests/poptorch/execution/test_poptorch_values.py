"""Models of transformers that ask for values of tensors equal plain torch."""

import copy

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_front import assert_close, make_options


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Not where tests are collected, which each process does: to import transformers takes seconds."""
    global transformers
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.support import poptorch_hugging_face  # noqa: F401  # which sets transformers up


TOKENS = torch.randint(3, 50, (2, 16), generator=torch.Generator().manual_seed(0))
# Attributes of configurations; each type takes those that it has.
SMALL = {
    **dict.fromkeys(["hidden_size", "d_model", "intermediate_size", "image_size", "codebook_size"], 16),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 16),
    **dict.fromkeys(["num_attention_heads", "num_key_value_heads"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
    **dict.fromkeys(["num_hidden_layers", "encoder_layers", "decoder_layers", "num_lstm_layers"], 1),
    **dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"], 0.0),
    **dict.fromkeys(["max_position_embeddings", "max_encoder_position_embeddings"], 64),
    **dict.fromkeys(["patch_size", "head_dim", "vector_quantization_hidden_dimension"], 8),
    "num_filters": 4,
    "vocab_size": 60,
    "attention_window": [8],
    "upsample_groups": 16,
}


def make_config(name, **values):
    kind = getattr(transformers, f"{name}Config")
    default = kind()
    return kind(**{**{n: value for n, value in SMALL.items() if hasattr(default, n)}, **values})


def make_longformer():
    """Asks whether a token attends to all others."""
    return transformers.LongformerModel(make_config("Longformer")), {"input_ids": TOKENS}


def make_led():
    """Asks how many windows there are."""
    return transformers.LEDModel(make_config("LED")), {"input_ids": TOKENS, "decoder_input_ids": TOKENS}


def make_llava():
    """Checks that there are as many places for images as images have patches."""
    vision = make_config("CLIPVision", num_hidden_layers=2)
    config = make_config(
        "Llava", vision_config=vision, text_config=make_config("Llama"), image_token_index=59
    )
    ids = TOKENS.clone()
    ids[:, 2:6] = 59
    model = transformers.LlavaForConditionalGeneration(config)
    return model, {"input_ids": ids, "pixel_values": torch.rand(2, 3, 16, 16)}


def make_mimi():
    """Computes paddings from buffers."""
    model = transformers.MimiModel(make_config("Mimi", codebook_dim=8, num_quantizers=4))
    return model, {"input_values": torch.rand(1, 1, 2400)}


def make_encodec():
    model = transformers.EncodecModel(make_config("Encodec", codebook_dim=16))
    return model, {"input_values": torch.rand(1, 1, 1200)}


def make_informer():
    """Has masks only if it is exported, and of sizes that it cannot use."""
    dropouts = dict.fromkeys(["attention_dropout", "activation_dropout", "encoder_layerdrop"], 0.0)
    sizes = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 2}
    config = make_config("Informer", **dropouts, **sizes, decoder_layerdrop=0.0, encoder_layers=2)
    return transformers.InformerModel(config), {
        "past_values": torch.randn(2, 10),
        "past_time_features": torch.randn(2, 10, 2),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 2),
    }


class Reduced(torch.nn.Module):
    """A model with a loss."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors):
        output = self.model(**dict(zip(self.names, tensors, strict=True)))
        return poptorch.identity_loss(output[0].square().mean(), "none")


def options_of(make):
    options = make_options()
    if make is make_longformer:
        options.allowValueBranches(True)
    return options


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make", [make_longformer, make_led, make_llava, make_mimi, make_encodec, make_informer]
)
def test_inference_equals_plain_torch(make):
    torch.manual_seed(0)
    model, batch = make()
    model.eval()
    with torch.no_grad():
        expected = model(**batch)
    outputs = poptorch.inferenceModel(model, options_of(make))(**batch)
    assert list(outputs) == [name for name in expected if name in outputs]
    for name, output in outputs.items():
        if isinstance(output, torch.Tensor):
            assert_close([output.float()], [expected[name].float()])


@pytest.mark.thorough
@pytest.mark.parametrize("make", [make_longformer, make_llava, make_informer])
def test_a_training_step_equals_plain_torch(make):
    torch.manual_seed(0)
    model, batch = make()
    wrapped = Reduced(model, list(batch))
    plain = copy.deepcopy(wrapped)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (wrapped, plain)]
    training = poptorch.trainingModel(wrapped, options_of(make), optimizers[0])
    loss = training(*batch.values())
    expected = plain(*batch.values())
    expected.backward()
    optimizers[1].step()
    assert_close([loss], [expected.detach()])
    training.copyWeightsToHost()
    assert_close(wrapped.state_dict().values(), plain.state_dict().values())
