"""Models of transformers equal plain torch; see `poptorch_hugging_face`."""

import jax
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.engine.planning import plan_memory
from tests.support.poptorch_front import (
    assert_close,
    infer,
    ipus_of,
    leaves,
    make_options,
    relative_difference,
)

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
OTHERS = [
    "AlbertForQuestionAnswering",
    "BertForMaskedLM",
    "GPT2LMHeadModel",
    "MixtralForCausalLM",
    "ResNetForImageClassification",
    "T5ForConditionalGeneration",
]
INFERRED = {"MixtralForCausalLM", "T5ForConditionalGeneration", "Wav2Vec2ForSequenceClassification"}


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Not where tests are collected, which each process does: to import transformers takes seconds."""
    global transformers, hf
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.support import poptorch_hugging_face as hf


# Softmax takes away what moves all scores alike, of a query or of a position.
WITHOUT_GRADIENT = ("attention.self.key.bias", "qa_outputs.bias")


def assert_same_training(trained, num_steps):
    """Outputs and losses of each step are equal; and after the last, all weights."""
    tolerance = TOLERANCES[trained.dtype]
    for seed in range(num_steps):
        output, expected = trained.step(seed)
        assert_close(leaves(output), expected, tolerance)
    state, expected = trained.model.state_dict(), trained.plain.state_dict()
    assert state.keys() == expected.keys()
    for name, wanted in expected.items():
        assert relative_difference(state[name], wanted) <= tolerance, name
    return output


def infer_as_torch(model, make_batch, num_micro_batches=4, **options):
    """What an inference model returns is what the model does."""
    model.eval()
    batch = hf.cast(hf.inputs_of(make_batch(2 * num_micro_batches, 99)), next(model.parameters()).dtype)
    inference = poptorch.inferenceModel(model, make_options(num_micro_batches, **options))
    output = inference(**batch)
    with torch.no_grad():
        parts = [model(**part) for part in hf.of_micro_batches(batch, num_micro_batches)]
    expected = [torch.cat(same) for same in zip(*map(leaves, parts), strict=True)]
    assert type(output) is type(parts[0])
    assert_close(leaves(output), expected, TOLERANCES[expected[0].dtype])
    return inference, output


# Question answering in four stages, listing 8.


@pytest.mark.thorough
def test_listing_8():
    model = hf.make_bert(hf.PipelinedBert, **hf.NARROW)
    inference, _output = infer_as_torch(model, hf.questions)
    assert ipus_of(inference) == [0, 1, 2, 3]
    sections = inference._compiled.stages.sections
    names = [{str(node.target) for node in section.nodes} for section in sections]
    assert ["aten.embedding.default" in found for found in names] == [True, False, False, False]
    stacks = [node.meta.get("nn_module_stack", {}) for node in sections[3].nodes]
    last = {path for stack in stacks for path, _kind in stack.values()}
    assert {"bert.encoder.layer.4", "bert.encoder.layer.5", "qa_outputs"} <= last
    assert "bert.encoder.layer.3" not in last
    assert inference.config.hidden_size == 8
    assert inference.num_labels == 2


@pytest.mark.thorough
def test_two_layers_train():
    """An unmodified model: its outputs and its two losses are dealt with here."""
    trained = hf.Trained(hf.make_bert(num_hidden_layers=2, **hf.NARROW), hf.questions, accumulation=2)
    output = assert_same_training(trained, 2)
    assert isinstance(output, transformers.modeling_outputs.QuestionAnsweringModelOutput)
    assert output["loss"] is output.loss
    assert output.loss.shape == (2,)
    assert output.start_logits is output[1]
    assert output.hidden_states is None
    assert list(output) == ["loss", "start_logits", "end_logits"]
    assert ipus_of(trained.executor) == [0, 1]


@pytest.mark.thorough
def test_gradients_in_float64():
    """With a rate of 1 the first update of SGD subtracts the gradients."""

    def make(optimizer):
        return lambda model: optimizer(model.parameters(), lr=1.0)

    with jax.enable_x64(True):
        model = hf.make_bert(hf.PipelinedBert).double()
        before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        trained = hf.Trained(model, hf.questions, (make(poptorch.optim.SGD), make(torch.optim.SGD)))
        trained.step(0)
        for name, parameter in model.named_parameters():
            gradient = trained.plain.get_parameter(name).grad
            if name.endswith(WITHOUT_GRADIENT):
                assert gradient.norm() < 1e-15
                assert (before[name] - parameter).norm() < 1e-14
            else:
                difference = (before[name] - parameter - gradient).norm()
                assert difference <= 1e-12 * gradient.norm() + 2**-52 * before[name].norm(), name


# The outputs of models.


@pytest.mark.thorough
def test_all_that_a_model_returns():
    """Tuples within the data class, of values that several stages make."""
    model = hf.make_bert(output_hidden_states=True, output_attentions=True, attn_implementation="eager")
    output = assert_same_training(hf.Trained(model, hf.questions), 1)
    assert len(output.hidden_states) == 7
    assert output.attentions[5].shape == (8, 2, hf.LENGTH, hf.LENGTH)


def test_a_cache_is_left_out(caplog):
    config = transformers.GPT2Config(**{**hf._GPT2, "n_layer": 1, "use_cache": True})
    model, ids = transformers.GPT2Model(config).eval(), torch.ones(1, 4).long()
    made = infer(model, ids)
    expected = model(ids, use_cache=False)
    assert type(made) is type(expected)
    assert list(made) == list(expected) == ["last_hidden_state"]
    assert_close(made.values(), [value.detach() for value in expected.values()])
    assert "returns a cache of keys and values, which is left out" in caplog.text
    (found,) = infer(model, ids, return_dict=False)
    assert_close([found], [made.last_hidden_state])


def test_generate_refuses_what_it_does_not_support():
    """Before anything is captured. `tests/poptorch/generation` has the tests of what it generates."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**hf._GPT2, "n_layer": 1})).eval()
    wrapped = poptorch.inferenceModel(model)
    number, most = model.config.vocab_size, model.config.n_positions
    flat = r"tensor of int64 or int32 \[rows, length\].*got torch.int64 \[4\]"
    cases = [
        ({}, "give the prompts once"),
        ({"input_ids": torch.ones(4).long()}, flat),
        ({"input_ids": torch.ones(1, 4)}, "got torch.float32"),
        ({"input_ids": torch.ones(2, 0).long()}, "at least one token"),
        ({"input_ids": torch.full((1, 4), number)}, f"from 0 to {number - 1}, .* row 0 has {number}"),
        ({"attention_mask": torch.ones(1, 5)}, r"shape of input_ids, \[1, 4\]; got \[1, 5\]"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, r"row 0 is \[1, 1, 1, 0\]"),
        ({"attention_mask": torch.zeros(1, 4)}, "at least one"),
        ({"input_ids": torch.tensor([[1, 0, 1]])}, r"\(found by pad_token_id.*, or give attention_mask"),
        ({"max_new_tokens": most}, f"4 tokens and {most} new ones are more than the {most} positions"),
        ({"max_length": 4}, "max_length must leave room"),
        ({"num_beams": 2}, "num_beams is not supported on the devices; got 2. Leave it at 1"),
        ({"repetition_penalty": 1.5}, "repetition_penalty is not supported"),
        ({"min_new_tokens": 3}, "min_new_tokens is not supported"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate is not supported"),
        ({"use_cache": False}, "use_cache is not supported"),
        ({"streamer": object()}, "streamer is not supported"),
        ({"token_type_ids": torch.ones(1, 4)}, "token_type_ids is not supported"),
        ({"do_sample": True, "temperature": 0.0}, "temperature must be above 0"),
    ]
    for arguments, text in cases:
        given = {"input_ids": torch.ones(1, 4).long(), "pad_token_id": 0} if arguments else {}
        with pytest.raises(poptorch.Error, match=f"(?s)^generate: .*{text}"):
            wrapped.generate(**{**given, **arguments})
    with pytest.raises(poptorch.Error, match="was in training mode when it was wrapped"):
        poptorch.inferenceModel(model.train()).generate(torch.ones(1, 4).long())
    model.eval()
    with pytest.raises(poptorch.Error, match=r"does not go with poptorch.Options\(\).checkIndices"):
        poptorch.inferenceModel(model, make_options().checkIndices(True)).generate(torch.ones(1, 4).long())


# Checkpoints.


@pytest.mark.thorough
def test_activation_checkpointing():
    def make(is_on):
        model = hf.make_bert(use_cache=False)
        if is_on:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return hf.Trained(model, hf.questions)

    def held(trained):
        return sum(stage.num_held_bytes for stage in plan_memory(trained.executor._compiled.pipeline))

    trained, other = make(True), make(False)
    assert_same_training(trained, 1)
    other.step(0)
    assert 0 < held(trained) < held(other) / 2


# Data.


@pytest.mark.thorough
def test_data_loader_of_dicts():
    """As the data sets of Hugging Face's programs are: an item is a dict, and a batch one with lists."""
    whole = hf.questions(8, 0)
    items = [{name: tensor[index] for name, tensor in whole.items()} for index in range(8)]

    def make_encoding(items):
        return transformers.BatchEncoding(torch.utils.data.default_collate(items))

    model = hf.make_bert(num_hidden_layers=2, **hf.NARROW)
    options = make_options(1, 2)
    training = poptorch.trainingModel(model, options, hf.make_sgd(model))
    # A tokenizer's own collators make a BatchEncoding, which is no dict.
    for collate, kind in (
        (None, dict),
        (transformers.default_data_collator, dict),
        (make_encoding, transformers.BatchEncoding),
    ):
        loader = poptorch.DataLoader(options, items, batch_size=2, collate_fn=collate)
        batches = list(loader)
        assert len(batches) == 2
        assert type(batches[1]) is kind
        assert batches[1].keys() == whole.keys()
        assert all(torch.equal(batches[1][name], tensor[4:]) for name, tensor in whole.items())
        assert training(**batches[1]).loss.isfinite().all()


# Other models.


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name):
    model, make_batch = hf.make_other(name)
    trained = hf.Trained(model, make_batch)
    assert_same_training(trained, 1)
    if name == "BertForMaskedLM":  # the decoder of the last stage is the table of the first
        assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert len(ipus_of(trained.executor)) == 1 + len(hf.OTHERS[name][2])
    if name in INFERRED:
        infer_as_torch(model, make_batch)


@pytest.mark.soak
def test_more_models():
    for name in sorted(hf.OTHERS.keys() - set(OTHERS)):
        test_other_models(name)


@pytest.mark.thorough
def test_a_model_that_asks_for_values_is_refused_by_its_line():
    """DeBERTa picks the rows that have a label, unless problem_type is set."""
    config = hf._config("DebertaV2", **hf._DEBERTA, num_labels=3)
    model = transformers.DebertaV2ForSequenceClassification(config)
    training = poptorch.trainingModel(model, make_options())
    with pytest.raises(poptorch.Error, match=r"modeling_deberta_v2.*asks for a value of a tensor"):
        training(**hf.classes(2, 0))
    model = hf.drawn(lambda: transformers.DebertaV2ForSequenceClassification(config))
    model.config.problem_type = "single_label_classification"
    assert_same_training(hf.Trained(model, hf.classes), 1)
