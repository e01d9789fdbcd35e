"""The 30 architectures, small and without weights; each package is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EYE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def build(name: str, package: str) -> nn.Module:
    """Return an architecture of a package by its name there, or in :data:`BUILDERS`."""
    model: nn.Module
    if package == "timm":
        import timm

        model = timm.create_model(name, pretrained=False)
    elif package == "torchvision":
        from torchvision.models import get_model

        model = get_model(name, weights=None, weights_backbone=None)
    else:
        model = BUILDERS[name]()
    return model


def _hf(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**options))
        return model

    return make


def _detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    eye = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[2, 2, 2, 2], out_features=["stage4"])
    config = DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=eye, d_model=32,
        encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_queries=8,
    )  # fmt: skip
    return DetrForObjectDetection(config)


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    return CLIPModel(
        CLIPConfig(text_config=CLIPTextConfig(**SMALL).to_dict(), vision_config=CLIPVisionConfig(**EYE).to_dict())
    )


def _llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=CLIPVisionConfig(**EYE), text_config=LlamaConfig(**SMALL))
    )


def _yolo() -> nn.Module:
    from ultralytics.nn.tasks import DetectionModel

    return DetectionModel("yolov8n.yaml", verbose=False)


def _unet() -> nn.Module:
    import segmentation_models_pytorch as smp

    return smp.Unet("resnet18", encoder_weights=None)


def _diffusers(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, kind)(**options)
        return model

    return make


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _hf("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_positions=64, n_embd=32, n_layer=4, n_head=4),
    "t5": _hf(
        "T5ForConditionalGeneration", "T5Config", vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4
    ),
    "whisper": _hf(
        "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=64, d_model=32, encoder_layers=3,
        decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        pad_token_id=0,
    ),
    "mixtral": _hf("MixtralForCausalLM", "MixtralConfig", **SMALL, num_local_experts=8),
    "jamba": _hf(
        "JambaForCausalLM", "JambaConfig", **{**SMALL, "num_hidden_layers": 8}, num_experts=4, mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "clip": _clip,
    "llava": _llava,
    "wav2vec2": _hf(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=32, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64,
    ),
    "segformer": _hf("SegformerForSemanticSegmentation", "SegformerConfig"),
    "detr": _detr,
    "yolov8n": _yolo,
    "unet_resnet18": _unet,
    "unet_2d": _diffusers(
        "UNet2DModel", sample_size=32, block_out_channels=(32, 64, 64), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    ),
    "autoencoder_kl": _diffusers(
        "AutoencoderKL", block_out_channels=(32, 64, 64), norm_num_groups=8, layers_per_block=2,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
    ),
    "flux": _diffusers(
        "FluxTransformer2DModel", num_layers=3, num_single_layers=5, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(2, 2, 4), in_channels=4,
    ),
}  # fmt: skip
