"""Small models of transformers, made from the names of their types, and what to call them with."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once

import torch
import transformers

__all__ = ["find_inputs", "make_model"]

BATCH, LENGTH, IMAGE, SAMPLES, FRAMES, NUM_TOKENS = 4, 8, 32, 800, 16, 50
MOST_PARAMETERS = 5_000_000

# Value -> the attributes of configurations that have it here, where they exist.
_SMALL: Sequence[tuple[Any, str]] = [
    (
        32,
        "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size projection_dim d_embed output_dim",
    ),
    (
        48,
        "intermediate_size d_ff ffn_dim n_inner hidden_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim",
    ),
    (48, "moe_intermediate_size d_inner shared_expert_intermediate_size mlp_dim"),
    (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"),
    (2, "num_encoder_layers num_blocks num_decoder_blocks num_feat_extract_layers num_frames block_size"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (2, "l_layers r_layers x_layers"),
    (2, "num_key_value_heads num_experts_per_tok num_selected_experts top_k"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_conv_pos_embedding_groups"),
    (8, "head_dim d_kv rotary_dim qk_nope_head_dim v_head_dim qk_rope_head_dim kv_lora_rank q_lora_rank"),
    (8, "time_step_rank hidden_size_per_layer_input state_size patch_size"),
    (1, "n_group topk_group bos_token_id decoder_start_token_id forced_bos_token_id"),
    (NUM_TOKENS, "vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size"),
    (64, "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len"),
    (0, "pad_token_id layerdrop encoder_layerdrop decoder_layerdrop router_jitter_noise mask_time_prob"),
    (0, "mask_feature_prob stochastic_depth_prob drop_path_rate"),
    (2, "eos_token_id sep_token_id cls_token_id"),
    (1.0, "pos_embed_rescale"),  # with others it is random
    (False, "use_cache apply_spec_augment use_pretrained_backbone"),
    (IMAGE, "image_size max_length"),
    (16, "num_conv_pos_embeddings num_mel_bins feature_projection_input_dim context_length"),
    (4, "window_size attention_window prediction_length"),
    ([16, 16], "conv_dim axial_pos_embds_dim"),
    ([10, 3], "conv_kernel"),
    ([5, 2], "conv_stride"),
    ([2, 4], "axial_pos_shape"),
]
# Likewise, for lists of one value per stage.
_STAGES: Mapping[str, Any] = {
    "depths": lambda values: [1] * len(values),
    "hidden_sizes": lambda values: [32] * len(values),
    "num_attention_heads": lambda values: [2] * len(values),
    "num_heads": lambda values: [2] * len(values),
    "embed_dim": lambda values: [16 * (1 + number) for number in range(len(values))],
    "encoder_hidden_size": lambda values: [16] * len(values),
}


def _shrink(config: Any) -> Any:
    """A small configuration of the kind of another one."""
    values: dict[str, Any] = {}
    for name, small in [(name, small) for small, names in _SMALL for name in names.split()]:
        if isinstance(getattr(type(config), name, None), property) or not hasattr(config, name):
            continue  # a property follows from other attributes
        if (value := getattr(config, name)) is None:
            continue
        if isinstance(value, (list, tuple)) == isinstance(small, list):
            values[name] = float(small) if isinstance(value, float) else small
    for name, shorten in _STAGES.items():
        if isinstance(value := getattr(config, name, None), (list, tuple)):
            values[name] = shorten(value)
    for name, value in config.to_dict().items():
        if isinstance(value, float) and "drop" in name:
            values[name] = 0.0
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            values[name] = _shrink(part)
    return type(config)(**values)


def make_model(kind: str) -> torch.nn.Module:
    """A small model of a type, without dropout. Not a large one."""
    config = _shrink(transformers.AutoConfig.for_model(kind))
    with torch.device("meta"):
        size = sum(each.numel() for each in transformers.AutoModel.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters are too many.")
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config)
    for module in model.modules():
        if "Dropout" in type(module).__name__ and isinstance(getattr(module, "p", None), float):
            module.p = 0.0
    return draw(model).eval()


def draw(model: torch.nn.Module) -> torch.nn.Module:
    """Moves the weights away from zeros and ones, which would hide what is wrong with them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def find_inputs(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], Any]:
    """What a model can be called with, and what it then returns."""
    errors = []
    for inputs in _try_inputs(model):
        try:
            with torch.no_grad():
                return inputs, model(**inputs)
        except Exception as error:  # the next inputs may do
            errors.append(error)
    raise errors[0]


def _try_inputs(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs by the names of forward's parameters; the kinds of the first come first."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    mels: Any = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", 16)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0

    def normal(*sizes: Any) -> torch.Tensor:
        return torch.randn(BATCH, *sizes, generator=generator)

    def tokens() -> torch.Tensor:
        return torch.randint(3, NUM_TOKENS, (BATCH, LENGTH), generator=generator)

    vision = getattr(config, "vision_config", config)
    channels = getattr(vision, "num_channels", 3)
    channels = channels if isinstance(channels, int) else 3
    image = normal(channels, IMAGE, IMAGE)
    frames = getattr(config, "num_frames", 2)
    sequence = getattr(config, "max_source_positions", FRAMES)
    choices: dict[str, list[torch.Tensor]] = {
        "input_ids": [tokens()],
        "decoder_input_ids": [tokens()],
        "pixel_values": [image, normal(frames, channels, IMAGE, IMAGE)],
        "input_values": [
            normal(SAMPLES),
            normal(getattr(config, "max_length", 32), mels),
            normal(1, SAMPLES),
        ],
        "input_features": [normal(FRAMES, mels), normal(mels, 2 * sequence), normal(mels, FRAMES)],
        "past_values": [
            normal(getattr(config, "context_length", FRAMES), getattr(config, "num_input_channels", 1))
        ],
        "bbox": [torch.arange(4).expand(BATCH, LENGTH, 4)],
        "visual_feats": [normal(5, getattr(config, "visual_feat_dim", 16))],
        "visual_pos": [normal(5, 4)],
    }
    names = inspect.signature(model.forward).parameters
    asked = {name: values for name, values in choices.items() if name in names}
    for values in itertools.product(*asked.values()):
        inputs = dict(zip(asked, values, strict=True))
        if "input_ids" in inputs and "attention_mask" in names:
            yield {**inputs, "attention_mask": mask}
        yield inputs
    main = model.main_input_name
    yield {main: choices[main][0]}
