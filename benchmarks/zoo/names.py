"""Types of models of transformers, by their names there."""

__all__ = ["FIRST_CALLS", "TYPES"]

_NAMES = """
    bert roberta albert distilbert electra deberta deberta-v2 xlm-roberta camembert mpnet convbert
    funnel big_bird longformer fnet mobilebert squeezebert megatron-bert ernie roformer canine xlm
    flaubert xlnet rembert ibert nystromformer yoso mra luke layoutlm lilt bros esm splinter nezha
    modernbert modernbert-decoder nomic_bert eurobert data2vec-text gpt2 gpt_neo gpt_neox gptj opt
    bloom codegen llama mistral mixtral gemma gemma2 gemma3_text gemma3n_text phi phi3 qwen2 qwen3
    qwen2_moe qwen3_moe qwen3_next falcon mpt stablelm starcoder2 cohere cohere2 olmo olmo2 olmoe
    persimmon granite granitemoe dbrx jamba bamba mamba mamba2 falcon_mamba rwkv recurrent_gemma
    xlstm gpt_bigcode openai-gpt ctrl biogpt xglm glm glm4 nemotron helium diffllama deepseek_v2
    deepseek_v3 gpt_oss smollm3 llama4_text bitnet zamba reformer t5 mt5 umt5 longt5
    switch_transformers bart mbart pegasus pegasus_x blenderbot marian m2m_100 led prophetnet fsmt
    bigbird_pegasus nllb-moe plbart vit deit beit data2vec-vision swin swinv2 convnext convnextv2
    resnet regnet mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 efficientnet poolformer segformer
    dinov2 dinov2_with_registers dinov3_vit dpt levit cvt pvt pvt_v2 focalnet bit vit_mae vit_msn
    yolos hiera swiftformer van nat dinat glpn ijepa vitdet videomae vivit timesformer detr
    conditional_detr deformable_detr swin2sr efficientformer imagegpt textnet wav2vec2 hubert wavlm
    unispeech sew sew-d data2vec-audio wav2vec2-conformer wav2vec2-bert whisper speech_to_text
    audio-spectrogram-transformer encodec moonshine clip clip_text_model clip_vision_model siglip
    siglip_vision_model blip align altclip chinese_clip groupvit owlvit flava vilt visual_bert
    lxmert x_clip blip_2 bridgetower patchtst patchtsmixer time_series_transformer
    decision_transformer perceiver vits univnet timesfm
"""
TYPES = _NAMES.split()
FIRST_CALLS = ["bert", "gpt2", "t5", "vit", "resnet", "llama"]
