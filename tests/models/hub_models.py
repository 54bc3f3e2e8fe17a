"""Small models of transformers' classes without a template, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

TEXT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                        "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
                        "eos_token_id": 2}  # fmt: skip
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
          "image_size": 32, "patch_size": 8}  # fmt: skip
SPEECH = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99,
          "max_source_positions": 50, "max_target_positions": 20, "num_mel_bins": 8, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
MIXTURE = TEXT | {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
HEADS = {"mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "electra": ("ElectraConfig", "ElectraForMaskedLM", TEXT | {"embedding_size": 32}),
    "deit": ("DeiTConfig", "DeiTForImageClassification", VISION),
    "ernie": ("ErnieConfig", "ErnieForSequenceClassification", TEXT),
    "mpnet": ("MPNetConfig", "MPNetForTokenClassification", TEXT),
    "eurobert": ("EuroBertConfig", "EuroBertForMaskedLM", TEXT | {"num_key_value_heads": 4, "mask_token_id": 3}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    "opt": ("OPTConfig", "OPTForCausalLM", TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "t5": ("T5Config", "T5ForConditionalGeneration",
           {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99,
            "decoder_start_token_id": 0}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", SPEECH),
    "bart": ("BartConfig", "BartForConditionalGeneration",
             SPEECH | {"max_position_embeddings": 64, "forced_eos_token_id": None}),
    "marian": ("MarianConfig", "MarianMTModel",
               SPEECH | {"max_position_embeddings": 64, "forced_eos_token_id": None}),
    "xlnet": ("XLNetConfig", "XLNetLMHeadModel",
              {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64, "vocab_size": 99, "use_mems_eval": False}),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM",
               TEXT | {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 256,
                       "num_hidden_layers": 1, "use_cache": False}),
    "mamba": ("MambaConfig", "MambaForCausalLM",
              TEXT | {"state_size": 4, "num_hidden_layers": 1, "use_cache": False}),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", TEXT | {"state_size": 4}),
    "jamba": ("JambaConfig", "JambaForCausalLM",
              TEXT | {"num_key_value_heads": 2, "mamba_d_state": 4, "mamba_dt_rank": 3, "attn_layer_period": 2,
                      "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1}),
    "zamba": ("ZambaConfig", "ZambaForCausalLM",
              TEXT | {"num_key_value_heads": 2, "mamba_d_state": 4, "mamba_dt_rank": 3, "n_mamba_heads": 2,
                      "attention_head_dim": 16, "num_hidden_layers": 4,
                      "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]}),
    "bamba": ("BambaConfig", "BambaForCausalLM",
              TEXT | HEADS | {"num_key_value_heads": 2, "mamba_chunk_size": 4, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM",
                  TEXT | HEADS | {"num_key_value_heads": 2, "mamba_chunk_size": 8, "mamba_d_ssm": 64,
                                  "ssm_multipliers": [0.5, 0.25, 0.75, 1.5, 2.0]}),
    "zamba2": ("Zamba2Config", "Zamba2ForCausalLM",
               TEXT | {"mamba_d_state": 4, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 4,
                       "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4}),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM",
                   TEXT | {"num_key_value_heads": 2, "ssm_state_size": 4, "mamba_num_heads": 8, "mamba_head_dim": 8,
                           "n_groups": 2, "chunk_size": 8, "hybrid_override_pattern": "M*-", "num_hidden_layers": 3,
                           "head_dim": 8}),
    "granite_hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
                       TEXT | HEADS | {"num_key_value_heads": 2, "mamba_chunk_size": 4, "num_local_experts": 0,
                                       "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16}),
    "recurrent_gemma": ("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM",
                        TEXT | {"lru_width": 32, "attention_window_size": 8, "head_dim": 8, "num_key_value_heads": 1,
                                "num_hidden_layers": 3}),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", TEXT | {"attention_hidden_size": 32, "use_cache": False}),
    "clip": ("CLIPConfig", "CLIPModel",
             {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}),
    "ast": ("ASTConfig", "ASTForAudioClassification",
            TEXT | {"max_length": 48, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC", TEXT | {
        "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}),
    "swinv2": ("Swinv2Config", "Swinv2ForImageClassification",
               {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4],
                "window_size": 4}),
    "beit": ("BeitConfig", "BeitModel", VISION),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM",
                 MIXTURE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM",
                    MIXTURE | {"num_key_value_heads": 4, "n_routed_experts": 12, "n_group": 2, "topk_group": 1,
                               "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 8,
                               "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM",
                     MIXTURE | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
                                "moe_layer_start_index": 1}),
    "hunyuan_moe": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM",
                    MIXTURE | {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM",
                 MIXTURE | {"num_experts": 4, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"]}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM",
                TEXT | {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                        "sliding_window": 4}),
    "hrm_text": ("HrmTextConfig", "HrmTextForCausalLM", TEXT | {"num_key_value_heads": 2}),
    "resnet": ("ResNetConfig", "ResNetForImageClassification",
               {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}),
}  # fmt: skip


def saved(name: str, directory: Path, **options: Any) -> Any:
    """Save a model of the class with random weights, batch statistics included; return it.

    `options` are those of `save_pretrained`.
    """
    config, made, fields = MODELS[name]
    torch.manual_seed(7)
    module = getattr(tf, made)(getattr(tf, config)(**fields)).eval()
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.ndim == 1 and tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.2)
    module.save_pretrained(directory, **options)
    return module
