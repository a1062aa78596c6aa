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


NARROW = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "dropout": 0.0,
}


def tokens():
    return torch.randint(3, 50, (2, 16), generator=torch.Generator().manual_seed(0))


def make_longformer():
    """Asks whether a token attends to all others."""
    config = transformers.LongformerConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        attention_window=[8],
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.LongformerModel(config), {"input_ids": tokens()}


def make_led():
    """Asks how many windows there are."""
    config = transformers.LEDConfig(
        vocab_size=50,
        attention_window=[8],
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        **NARROW,
    )
    return transformers.LEDModel(config), {"input_ids": tokens(), "decoder_input_ids": tokens()}


def make_llava():
    """Checks that there are as many places for images as images have patches."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    text = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=59)
    ids = tokens()
    ids[:, 2:6] = 59
    return transformers.LlavaForConditionalGeneration(config), {
        "input_ids": ids,
        "pixel_values": torch.rand(2, 3, 16, 16),
    }


def make_mimi():
    """Computes paddings from buffers."""
    config = transformers.MimiConfig(
        hidden_size=16,
        num_filters=4,
        num_hidden_layers=1,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        codebook_size=16,
        codebook_dim=8,
        vector_quantization_hidden_dimension=8,
        num_quantizers=4,
        upsample_groups=16,
    )
    return transformers.MimiModel(config), {"input_values": torch.rand(1, 1, 2400)}


def make_encodec():
    config = transformers.EncodecConfig(
        hidden_size=16, num_filters=4, codebook_size=16, codebook_dim=16, num_lstm_layers=1
    )
    return transformers.EncodecModel(config), {"input_values": torch.rand(1, 1, 1200)}


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
@pytest.mark.parametrize("make", [make_longformer, make_led, make_llava, make_mimi, make_encodec])
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
@pytest.mark.parametrize("make", [make_longformer, make_llava])
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
