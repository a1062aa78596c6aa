"""Decoders of transformers generate on their devices what they generate in plain torch."""

import re

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_front import make_options, model_of
from tests.support.programs import ROOT

pytestmark = pytest.mark.thorough  # what is refused is in the quick tests of `test_poptorch_transformers`

NUM_WORDS = 40
SMALL = {"vocab_size": NUM_WORDS, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 12, "max_position_embeddings": 48}
SMALL |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
GPT2 = {"vocab_size": NUM_WORDS, "n_positions": 48, "n_embd": 8, "n_layer": 1, "n_head": 2}
GPT2 |= {"bos_token_id": 1, "eos_token_id": None}


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Not where tests are collected, which each process does: to import transformers takes seconds."""
    global transformers, hf
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.support import poptorch_hugging_face as hf


@pytest.fixture(scope="module")
def gpt2(_imported):
    """A GPT-2 in two stages, of which the last one reads the first one's table of words."""
    model = hf.drawn(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))).eval()
    return hf.begin_blocks(model, ["transformer.ln_f"])


@pytest.fixture(scope="module")
def wrapped(gpt2):
    return poptorch.inferenceModel(gpt2, make_options())


def make_decoder(kind, config):
    model = hf.drawn(lambda: kind(config)).eval()
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    poptorch.BeginBlock(layers[1], ipu_id=1)
    return model


def make_prompts(rows=3, length=11):
    """The second row has padding on the left, if there is one."""
    ids = torch.randint(3, NUM_WORDS, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:2, :4] = 0
    return ids * mask, mask


def assert_generates_the_same(wrapped, ids, mask, **arguments):
    expected = wrapped.model.generate(ids, attention_mask=mask, **arguments)
    found = wrapped.generate(ids, attention_mask=mask, **arguments)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()
    return expected


def test_tokens_are_those_of_plain_torch(wrapped):
    """Prompts of several lengths, and stop tokens."""
    ids, mask = make_prompts()
    made = assert_generates_the_same(wrapped, ids, mask, max_new_tokens=9, pad_token_id=0)
    assert wrapped.isCompiled() is False  # for calls
    stop = int(made[0, 13])
    stopped = assert_generates_the_same(wrapped, ids, mask, max_new_tokens=9, eos_token_id=stop)
    assert not torch.equal(stopped, made[:, : stopped.shape[1]])


def test_tokens_that_are_drawn_and_weights_that_change(gpt2, wrapped):
    ids, mask = make_prompts()
    made = assert_generates_the_same(wrapped, ids, mask, max_new_tokens=9, pad_token_id=0)
    config = transformers.GenerationConfig(max_length=15, do_sample=True, top_k=1, pad_token_id=0)
    with torch.inference_mode():  # padding is found by its token
        assert_generates_the_same(wrapped, ids, None, generation_config=config)
    drawn = {"do_sample": True, "top_p": 0.9, "temperature": 2.0, "num_return_sequences": 2}
    rows = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        rows.append(wrapped.generate(ids[:1], max_new_tokens=9, **drawn).tolist())
    assert rows[0] == rows[1] != rows[2]
    assert rows[0][0] != rows[0][1]
    with torch.no_grad():
        for parameter in gpt2.parameters():
            parameter.mul_(-1)
    wrapped.copyWeightsToDevice()
    other = assert_generates_the_same(wrapped, ids, mask, max_new_tokens=9, pad_token_id=0)
    assert not torch.equal(made, other)


def test_models_that_are_refused():
    """Before they are captured: masks by lengths, a state instead of a cache, and both kinds of layers."""
    local = {"window_size": 4, "attention_types": [[["global", "local"], 1]]}
    sizes = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
    mixed = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    kinds = [
        ("GPTNeo", {**sizes, **local}, "computes other logits when its cache"),
        ("Mamba", sizes, "keeps something else between tokens than the keys and values"),
        ("Jamba", {**SMALL, **mixed, "num_key_value_heads": 1}, "cannot be called with a cache of keys"),
    ]
    for kind, values, text in kinds:
        config = getattr(transformers, f"{kind}Config")(**values)
        wrapped = poptorch.inferenceModel(getattr(transformers, f"{kind}ForCausalLM")(config).eval())
        with pytest.raises(poptorch.Error, match=f"generate: {kind}ForCausalLM {text}"):
            wrapped.generate(torch.ones(1, 4).long())


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("Bloom", {}),
        ("Gemma3", {"sliding_window": 4, "head_dim": 4, "num_key_value_heads": 1}),
        ("GPTNeoX", {}),
        ("Llama", {"num_key_value_heads": 1}),
        ("Mixtral", {"num_local_experts": 3, "num_key_value_heads": 1}),
        ("OPT", {"ffn_dim": 12, "word_embed_proj_dim": 8}),
    ],
)
def test_other_decoders(kind, values):
    """With masks of windows, rotations and biases of positions, fewer heads of keys, and experts."""
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")
    model = make_decoder(getattr(transformers, f"{kind}ForCausalLM"), config(**SMALL, **values))
    wrapped = poptorch.inferenceModel(model, make_options())
    assert_generates_the_same(wrapped, *make_prompts(), max_new_tokens=9)


def test_the_page(capsys):
    page = (ROOT / "docs" / "poptorch.md").read_text().partition("\n### Generation\n")[2]
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    exec(code, {"__name__": "page"})  # noqa: S102  # the page is ours
    assert capsys.readouterr().out == printed


def test_longer_requests_more_rows_and_training_between(gpt2):
    """Caches and slots grow; the weights of a model that trains are the newest."""
    wrapped = poptorch.inferenceModel(gpt2, make_options())
    made = assert_generates_the_same(wrapped, *make_prompts(1, 3), max_new_tokens=4, pad_token_id=0)
    assert_generates_the_same(wrapped, *make_prompts(7, 12), max_new_tokens=36, pad_token_id=0)
    with_loss = model_of(lambda self, ids: self.model(ids, labels=ids).loss, linear=None, model=gpt2)
    optimizer = poptorch.optim.SGD(gpt2.parameters(), lr=1.0)
    training = poptorch.trainingModel(with_loss, make_options(), optimizer)
    training(torch.ones(1, 8).long())
    other = assert_generates_the_same(wrapped, *make_prompts(1, 3), max_new_tokens=4, pad_token_id=0)
    assert not torch.equal(made, other)
    wrapped.detachFromDevice()
    assert_generates_the_same(wrapped, *make_prompts(1, 3), max_new_tokens=4, pad_token_id=0)
    wrapped.destroy()
