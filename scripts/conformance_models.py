"""Small modules of transformers, torchvision and timm with inputs of two sizes, for `scripts/conformance.py`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "max_position_embeddings": 64, "n_positions": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "sliding_window": 16,
}  # fmt: skip
"""Sizes of a small config; each config class ignores those that it does not have."""
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
VISION = {**SMALL, "image_size": 32, "patch_size": 8, "num_channels": 3}
AUDIO = {
    **SMALL, "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
TWO_SIDES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    **{k: SMALL[k] for k in ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id",
                             "use_cache")},
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99,
      "decoder_start_token_id": 0, "use_cache": False}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Case:
    """A module to open.

    Attributes:
        kind: `transformers`, `torchvision` or `timm`.
        name: the class or model.
        make: function that returns the module.
        inputs: function from the number of an example, 0 or 1, to the inputs by name.
        sizes: named sizes of the inputs.
    """

    kind: str
    name: str
    make: Callable[[], torch.nn.Module]
    inputs: Callable[[int], dict[str, torch.Tensor]]
    sizes: dict[str, tuple[Any, ...]]


def tokens(i: int, names: tuple[str, ...] = ("input_ids",)) -> dict[str, torch.Tensor]:
    """Return token ids of example 0 or 1 by input name."""
    return {n: torch.randint(3, 90, ((2, 7), (3, 50))[i] if k == 0 else ((2, 5), (3, 40))[i])
            for k, n in enumerate(names)}  # fmt: skip


def images(i: int, name: str = "pixel_values", size: int = 32) -> dict[str, torch.Tensor]:
    """Return images of example 0 or 1 by input name."""
    return {name: torch.randn((2, 3)[i], 3, size, size)}


def _transformers(name: str, config: str, values: dict[str, Any], kind: str) -> Case:
    def make() -> torch.nn.Module:
        tf = importlib.import_module("transformers")
        kind = getattr(tf, config)
        given = {k: v for k, v in values.items() if not isinstance(getattr(kind, k, None), property)}
        made = kind(**given)
        for key, value in given.items():  # attributes of other names than the arguments
            if not hasattr(made, key):
                setattr(made, key, value)
        return getattr(tf, name)(made)

    size = values.get("image_size", 32)
    inputs, sizes = {
        "text": (tokens, {"input_ids": ("B", "T")}),
        "pair": (lambda i: tokens(i, ("input_ids", "decoder_input_ids")),
                 {"input_ids": ("B", "S"), "decoder_input_ids": ("B", "T")}),
        "image": (lambda i: images(i, size=size), {"pixel_values": ("B", 3, size, size)}),
        "image sizes": (lambda i: {"pixel_values": torch.randn((2, 3)[i], 3, *((64, 96), (96, 128))[i])},
                        {"pixel_values": ("B", 3, "H", "W")}),
        "sound": (lambda i: {"input_values": torch.randn((2, 3)[i], (400, 560)[i])}, {"input_values": ("B", "T")}),
        "mel": (lambda i: {"input_features": torch.randn((2, 3)[i], 8, 100), **tokens(i, ("decoder_input_ids",))},
                {"input_features": ("B", 8, 100), "decoder_input_ids": ("B", "T")}),
        "spectrogram": (lambda i: {"input_values": torch.randn((2, 3)[i], 48, 16)}, {"input_values": ("B", 48, 16)}),
        "both": (lambda i: {**tokens(i), **images(i)}, {"input_ids": ("N", "T"), "pixel_values": ("B", 3, 32, 32)}),
    }[kind]  # fmt: skip
    return Case("transformers", name, make, inputs, sizes)


_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    # decoders
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", GROUPED),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", GROUPED),
    "GemmaForCausalLM": ("GemmaConfig", GROUPED),
    "Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, "query_pre_attn_scalar": 8}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**GROUPED, "query_pre_attn_scalar": 8}),
    "PhiForCausalLM": ("PhiConfig", {}),
    "Phi3ForCausalLM": ("Phi3Config", {"num_key_value_heads": 2}),
    "OlmoForCausalLM": ("OlmoConfig", {}),
    "Olmo2ForCausalLM": ("Olmo2Config", {"num_key_value_heads": 2}),
    "Olmo3ForCausalLM": ("Olmo3Config", {"num_key_value_heads": 2}),
    "StableLmForCausalLM": ("StableLmConfig", {"num_key_value_heads": 2}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {}),
    "GPT2LMHeadModel": ("GPT2Config", {}),
    "GPTJForCausalLM": ("GPTJConfig", {"rotary_dim": 4}),
    "GPTNeoForCausalLM": ("GPTNeoConfig", {"num_layers": 2, "num_heads": 4,
                                           "attention_types": [[["global", "local"], 1]],
                                           "window_size": 4}),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", {}),
    "OPTForCausalLM": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "BloomForCausalLM": ("BloomConfig", {}),
    "FalconForCausalLM": ("FalconConfig", {}),
    "MptForCausalLM": ("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "CodeGenForCausalLM": ("CodeGenConfig", {"rotary_dim": 4}),
    "Starcoder2ForCausalLM": ("Starcoder2Config", {"num_key_value_heads": 2}),
    "CohereForCausalLM": ("CohereConfig", {"num_key_value_heads": 2}),
    "Cohere2ForCausalLM": ("Cohere2Config", {"num_key_value_heads": 2, "sliding_window": 4}),
    "GraniteForCausalLM": ("GraniteConfig", {"num_key_value_heads": 2}),
    "SmolLM3ForCausalLM": ("SmolLM3Config", {"num_key_value_heads": 2}),
    "GlmForCausalLM": ("GlmConfig", GROUPED),
    "Glm4ForCausalLM": ("Glm4Config", GROUPED),
    "NemotronForCausalLM": ("NemotronConfig", GROUPED),
    "PersimmonForCausalLM": ("PersimmonConfig", {}),
    "XGLMForCausalLM": ("XGLMConfig", {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}),
    # mixtures of experts
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, **EXPERTS}),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**GROUPED, **EXPERTS}),
    "OlmoeForCausalLM": ("OlmoeConfig", {"num_key_value_heads": 2, **EXPERTS}),
    "GptOssForCausalLM": ("GptOssConfig", {**GROUPED, **EXPERTS, "sliding_window": 4}),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", {"num_key_value_heads": 2, **EXPERTS}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1, "num_key_value_heads": 4}),
    # state-space and recurrent models
    "MambaForCausalLM": ("MambaConfig", {"state_size": 4}),
    "Mamba2ForCausalLM": ("Mamba2Config", {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1,
                                      "chunk_size": 4}),
    "FalconMambaForCausalLM": ("FalconMambaConfig", {"state_size": 4}),
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", {"lru_width": 32, "attention_window_size": 8}),
    # encoders
    "BertForMaskedLM": ("BertConfig", {}),
    "RobertaForSequenceClassification": ("RobertaConfig", {}),
    "XLMRobertaForTokenClassification": ("XLMRobertaConfig", {}),
    "DistilBertForMaskedLM": ("DistilBertConfig", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "AlbertForMaskedLM": ("AlbertConfig", {"embedding_size": 16}),
    "ElectraForPreTraining": ("ElectraConfig", {"embedding_size": 16}),
    "MPNetForMaskedLM": ("MPNetConfig", {}),
    "DebertaForMaskedLM": ("DebertaConfig", {"relative_attention": True, "pos_att_type": "c2p|p2c"}),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", {"relative_attention": True, "pos_att_type": "c2p|p2c",
                                                 "position_buckets": 8}),
    "ModernBertForMaskedLM": ("ModernBertConfig", {"local_attention": 4}),
    "CamembertForMaskedLM": ("CamembertConfig", {}),
    "ConvBertForMaskedLM": ("ConvBertConfig", {"embedding_size": 16}),
    "SqueezeBertForMaskedLM": ("SqueezeBertConfig", {"embedding_size": 32}),
    "MobileBertForMaskedLM": ("MobileBertConfig", {"embedding_size": 32, "intra_bottleneck_size": 32,
                                                   "true_hidden_size": 32}),
    "RemBertForMaskedLM": ("RemBertConfig", {"input_embedding_size": 16, "output_embedding_size": 16}),
    "FNetForMaskedLM": ("FNetConfig", {}),
    "XLNetLMHeadModel": ("XLNetConfig", {"d_model": 32, "d_inner": 64, "use_mems_eval": False}),
    "NystromformerForMaskedLM": ("NystromformerConfig", {"segment_means_seq_len": 64, "num_landmarks": 64}),
    "YosoForMaskedLM": ("YosoConfig", {"use_expectation": True}),
    "T5EncoderModel": ("T5Config", T5),
    "CLIPTextModel": ("CLIPTextConfig", {}),
}  # fmt: skip
_PAIR: dict[str, tuple[str, dict[str, Any]]] = {
    "T5ForConditionalGeneration": ("T5Config", T5),
    "MT5ForConditionalGeneration": ("MT5Config", {**T5, "feed_forward_proj": "gated-gelu"}),
    "BartForConditionalGeneration": ("BartConfig", TWO_SIDES),
    "MBartForConditionalGeneration": ("MBartConfig", TWO_SIDES),
    "PegasusForConditionalGeneration": ("PegasusConfig", TWO_SIDES),
    "MarianMTModel": ("MarianConfig", TWO_SIDES),
    "BlenderbotSmallForConditionalGeneration": ("BlenderbotSmallConfig", TWO_SIDES),
    "M2M100ForConditionalGeneration": ("M2M100Config", TWO_SIDES),
    "PLBartForConditionalGeneration": ("PLBartConfig", TWO_SIDES),
}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
_VISION: dict[str, tuple[str, dict[str, Any], str]] = {
    "ViTForImageClassification": ("ViTConfig", VISION, "image"),
    "DeiTForImageClassification": ("DeiTConfig", VISION, "image"),
    "BeitForImageClassification": ("BeitConfig", {**VISION, "use_relative_position_bias": True}, "image"),
    "Dinov2ForImageClassification": ("Dinov2Config", VISION, "image"),
    "SwinForImageClassification": ("SwinConfig", {
        "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "image"),
    "Swinv2ForImageClassification": ("Swinv2Config", {
        "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "image"),
    "ConvNextForImageClassification": ("ConvNextConfig", {**_STAGES, "num_stages": 2}, "image sizes"),
    "ConvNextV2ForImageClassification": ("ConvNextV2Config", {**_STAGES, "num_stages": 2}, "image sizes"),
    "CLIPVisionModel": ("CLIPVisionConfig", VISION, "image"),
    "SiglipVisionModel": ("SiglipVisionConfig", VISION, "image"),
    "ResNetForImageClassification": ("ResNetConfig", {**_STAGES, "embedding_size": 8, "layer_type": "basic"},
                                     "image sizes"),
    "RegNetForImageClassification": ("RegNetConfig", {**_STAGES, "embedding_size": 8, "groups_width": 4},
                                     "image sizes"),
    "MobileNetV2ForImageClassification": ("MobileNetV2Config", {"depth_multiplier": 0.25, "image_size": 64}, "image"),
    "SegformerForSemanticSegmentation": ("SegformerConfig", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3],
        "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16},
        "image sizes"),
    "PoolFormerForImageClassification": ("PoolFormerConfig", {
        "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
        "padding": [2, 1], "mlp_ratio": 2.0}, "image sizes"),
    "LevitForImageClassification": ("LevitConfig", {
        "image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
        "key_dim": [8, 8, 8], "attention_ratio": [2, 2, 2]}, "image"),
    "MobileViTForImageClassification": ("MobileViTConfig", {
        "image_size": 64, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [4, 8, 8, 16, 16, 16, 16],
        "num_attention_heads": 2}, "image"),
    "PvtForImageClassification": ("PvtConfig", {
        "image_size": 64, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
        "sequence_reduction_ratios": [4, 2, 2, 1]}, "image"),
    "CvtForImageClassification": ("CvtConfig", {
        "embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "image_size": 64}, "image"),
    "EfficientNetForImageClassification": ("EfficientNetConfig", {
        "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "image_size": 64}, "image"),
}  # fmt: skip
_SOUND: dict[str, tuple[str, dict[str, Any], str]] = {
    "WhisperForConditionalGeneration": ("WhisperConfig", {
        **TWO_SIDES, "max_source_positions": 50, "max_target_positions": 64, "num_mel_bins": 8,
        "suppress_tokens": None, "begin_suppress_tokens": None}, "mel"),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", AUDIO, "sound"),
    "HubertForCTC": ("HubertConfig", AUDIO, "sound"),
    "WavLMForCTC": ("WavLMConfig", {**AUDIO, "num_buckets": 8, "max_bucket_distance": 16}, "sound"),
    "UniSpeechForCTC": ("UniSpeechConfig", AUDIO, "sound"),
    "SEWForCTC": ("SEWConfig", {**AUDIO, "squeeze_factor": 2}, "sound"),
    "ASTForAudioClassification": ("ASTConfig", {
        **SMALL, "max_length": 48, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
        "spectrogram"),
}  # fmt: skip
_PARTS = {k: SMALL[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
_BOTH: dict[str, tuple[str, dict[str, Any]]] = {
    name: (f"{name.removesuffix('Model')}Config", {
        "text_config": {**_PARTS, "vocab_size": 99, "max_position_embeddings": 64, "eos_token_id": 2,
                        "projection_size": 32},
        "vision_config": {**_PARTS, "image_size": 32, "patch_size": 8}, "projection_dim": 16,
    }) for name in ("CLIPModel", "SiglipModel")
}  # fmt: skip


def transformers_cases() -> Iterator[Case]:
    """Yield the classes of transformers: decoders, encoders, pairs of both, vision, audio."""
    for name, (config, values) in _TEXT.items():
        yield _transformers(name, config, values if values is T5 else {**SMALL, **values}, "text")
    for name, (config, values) in _PAIR.items():
        yield _transformers(name, config, values, "pair")
    for name, (config, values, kind) in {**_VISION, **_SOUND}.items():
        yield _transformers(name, config, values, kind)
    for name, (config, values) in _BOTH.items():
        yield _transformers(name, config, values, "both")


# -- torchvision and timm ----------------------------------------------------------------------------------------------
def import_torchvision() -> Any:
    """Import torchvision; its compiled operators are missing beside torch without CUDA, and get their schemas here."""
    for name in ("nms", "qnms"):
        with suppress(RuntimeError):  # it exists already
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision")


def _seen(kind: str, name: str, make: Callable[[], torch.nn.Module], size: int, argument: str) -> Case:
    return Case(kind, name, make, lambda i: images(i, argument, size), {argument: ("B", 3, size, size)})


_SIDES = {"inception_v3": 96, "vit_h_14": 28, "maxvit_t": 224}


def torchvision_cases() -> Iterator[Case]:
    """Yield all classification models and segmentation models of torchvision."""
    tv = import_torchvision()
    for name in tv.models.list_models(module=tv.models):
        size = _SIDES.get(name, 64)
        options: dict[str, Any] = {"num_classes": 10}
        if name.startswith("vit_"):
            options["image_size"] = size if name in _SIDES else 32
            size = options["image_size"]
        if name in ("googlenet", "inception_v3"):
            options |= {"aux_logits": False, "init_weights": False}
        yield _seen("torchvision", name, lambda n=name, o=options: tv.models.get_model(n, weights=None, **o), size, "x")
    for name in tv.models.list_models(module=tv.models.segmentation):
        yield _seen("torchvision", name, lambda n=name: tv.models.get_model(
            n, weights=None, weights_backbone=None, num_classes=4), 64, "x")  # fmt: skip


TIMM = """
    resnet18 resnet26d resnet50 resnext50_32x4d seresnet18 skresnet18 wide_resnet50_2 res2net50_26w_4s resnest14d
    ecaresnet26t regnetx_002 regnety_002 efficientnet_b0 efficientnet_lite0 efficientnetv2_rw_t mobilenetv3_small_050
    mobilenetv4_conv_small mnasnet_small fbnetc_100 ghostnet_050 lcnet_050 tinynet_e convnext_atto convnextv2_atto
    densenet121 vgg11_bn dla34 dpn48b hrnet_w18_small nfnet_l0 repvgg_a0 rexnet_100 cspresnet50 vovnet39a xception41
    vit_tiny_patch16_224 deit_tiny_patch16_224 beit_base_patch16_224 cait_xxs24_224 swin_tiny_patch4_window7_224
    mixer_s32_224 resmlp_12_224 gmlp_ti16_224 poolformer_s12 mobilevit_xxs levit_128s pit_ti_224 xcit_nano_12_p16_224
    crossvit_tiny_240 coat_lite_tiny maxvit_rmlp_pico_rw_256 edgenext_xx_small efficientformer_l1 fastvit_t8
    inception_next_atto hgnetv2_b0 repghostnet_050 visformer_tiny volo_d1_224 eva02_tiny_patch14_224
"""
_TIMM_SIDES = {"crossvit_tiny_240": 240, "maxvit_rmlp_pico_rw_256": 256, "mobilevit_xxs": 128, "levit_128s": 224,
               "coat_lite_tiny": 224, "visformer_tiny": 224, "efficientformer_l1": 224}  # fmt: skip


def timm_cases() -> Iterator[Case]:
    """Yield models of timm of different kinds."""
    import_torchvision()
    timm = importlib.import_module("timm")
    known = set(timm.list_models())
    for name in TIMM.split():
        if name not in known:
            continue
        size = _TIMM_SIDES.get(name) or (224 if "224" in name or name.startswith(("mixer", "fastvit", "poolf")) else 64)
        yield _seen("timm", name, lambda n=name: timm.create_model(n, pretrained=False, num_classes=10), size, "x")
