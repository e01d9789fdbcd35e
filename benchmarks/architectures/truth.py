"""The right blocks of 30 architectures, read from their sources before the finder was run on any of them.

Blocks are what the data pass one after another from the input to the output: residual blocks, transformer layers,
units of convolutions, of every stage and of both sides. What runs side by side (heads, experts, branches, the levels
of a feature pyramid) is none, and neither are parts of a block. ``also`` lies in series too and may be found or not,
such as what makes images smaller between two stages.
"""

from __future__ import annotations

from typing import NamedTuple


class Truth(NamedTuple):
    """What is right for one architecture.

    Attributes:
        package: Where it is from.
        blocks: Patterns of names; ``*`` is any text without a dot. Modules without parameters are left out.
        also: Patterns of what may be found or not.
    """

    package: str
    blocks: tuple[str, ...]
    also: tuple[str, ...] = ()


TRUTHS: dict[str, Truth] = {
    # Stages of blocks.
    "resnet18": Truth("timm", ("layer[1-4].*",)),
    "regnetx_002": Truth("timm", ("s[1-4].*",)),
    "efficientnet_b0": Truth("timm", ("blocks.*.*",)),
    "convnext_atto": Truth("timm", ("stages.*.blocks.*",), ("stages.*.downsample",)),
    "swin_tiny_patch4_window7_224": Truth("timm", ("layers.*.blocks.*",), ("layers.*.downsample",)),
    "pvt_v2_b0": Truth("timm", ("stages.*.blocks.*",), ("stages.*.downsample", "patch_embed")),
    "mobilevit_xxs": Truth("timm", ("stages.*.*",)),
    "densenet121": Truth("timm", ("features.denseblock*.denselayer*",), ("features.transition*",)),
    "hrnet_w18_small": Truth("timm", ("layer1.*", "stage[2-4].*"), ("downsamp_modules.*",)),
    # Chains of unlike blocks, of blocks of one kind, of layers.
    "inception_v3": Truth("timm", ("Mixed_*",), ("Conv2d_*",)),
    "vit_tiny_patch16_224": Truth("timm", ("blocks.*",)),
    "vgg11": Truth("timm", ("features.*", "pre_logits.fc1", "pre_logits.fc2", "head.fc")),
    # Language, mixtures of experts, hybrids, encoders with decoders, towers.
    "gpt2": Truth("transformers", ("transformer.h.*",)),
    "t5": Truth("transformers", ("encoder.block.*", "decoder.block.*")),
    "whisper": Truth("transformers", ("model.encoder.layers.*", "model.decoder.layers.*"), ("model.encoder.conv[12]",)),
    "mixtral": Truth("transformers", ("model.layers.*",)),
    "jamba": Truth("transformers", ("model.layers.*",)),
    "clip": Truth("transformers", ("text_model.encoder.layers.*", "vision_model.encoder.layers.*")),
    "llava": Truth(
        "transformers",
        ("model.vision_tower.encoder.layers.*", "model.language_model.layers.*"),
        ("model.multi_modal_projector",),
    ),
    "wav2vec2": Truth(
        "transformers",
        ("wav2vec2.feature_extractor.conv_layers.*", "wav2vec2.encoder.layers.*"),
        ("wav2vec2.feature_projection",),
    ),
    # Segmentation and detection.
    "segformer": Truth("transformers", ("segformer.stages.*.blocks.*",), ("segformer.stages.*.patch_embeddings",)),
    "detr": Truth(
        "transformers",
        ("model.backbone.model.encoder.stages.*.layers.*", "model.encoder.layers.*", "model.decoder.layers.*"),
        ("model.input_projection",),
    ),
    "fasterrcnn_resnet50_fpn": Truth("torchvision", ("backbone.body.layer[1-4].*",)),
    "lraspp_mobilenet_v3_large": Truth(
        "torchvision", ("backbone.[1-9]", "backbone.1[0-5]"), ("backbone.0", "backbone.16")
    ),
    "deeplabv3_resnet50": Truth("torchvision", ("backbone.layer[1-4].*",)),
    "yolov8n": Truth("ultralytics", ("model.[0-9]", "model.1*", "model.20", "model.21"), ("model.22",)),
    # U-Nets, diffusion.
    "unet_resnet18": Truth("segmentation_models_pytorch", ("encoder.layer[1-4].*", "decoder.blocks.*")),
    "unet_2d": Truth(
        "diffusers",
        ("down_blocks.*.resnets.*", "mid_block.resnets.*", "up_blocks.*.resnets.*"),
        (
            "down_blocks.*.attentions.*",
            "mid_block.attentions.*",
            "up_blocks.*.attentions.*",
            "down_blocks.*.downsamplers.*",
            "up_blocks.*.upsamplers.*",
        ),
    ),
    "autoencoder_kl": Truth(
        "diffusers",
        (
            "encoder.down_blocks.*.resnets.*",
            "encoder.mid_block.resnets.*",
            "decoder.mid_block.resnets.*",
            "decoder.up_blocks.*.resnets.*",
        ),
        (
            "encoder.down_blocks.*.downsamplers.*",
            "decoder.up_blocks.*.upsamplers.*",
            "encoder.mid_block.attentions.*",
            "decoder.mid_block.attentions.*",
        ),
    ),
    "flux": Truth("diffusers", ("transformer_blocks.*", "single_transformer_blocks.*")),
}
