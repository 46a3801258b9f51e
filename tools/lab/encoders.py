"""llama.cpp's encoders of pictures and audio as a table: the contents of a file of each, and models for it.

A line of tensors is ``name:dims``, the outermost dimension first. ``name+`` has a bias of the first dimension in
addition to its weight, and ``name=`` is written unchanged. A dimension is a number, a letter of ``Eye.sizes``, or a
product of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

Content = int | float | list[int]

_ATTENTION: Final = "attn_q+:w,w attn_k+:w,w attn_v+:w,w attn_out+:w,w "
_BARE: Final = "attn_q:w,w attn_k:w,w attn_v:w,w attn_out:w,w "
_FUSED: Final = "attn_qkv+:3w,w attn_out+:w,w "
_NORMS: Final = "ln1+:w ln2+:w "
_PLAIN: Final = _ATTENTION + _NORMS + "ffn_up+:f,w ffn_down+:w,f"
_GATED: Final = "ln1:w ln2:w ffn_gate:f,w ffn_up:f,w ffn_down:w,f"
_STEM: Final = "v.patch_embd+:w,3,k,k v.position_embd:s,w v.post_ln+:w "
_CLASS: Final = "v.patch_embd:w,3,k,k v.class_embd=:w v.position_embd:c,w v.pre_ln+:w "
_TWO_FRAMES: Final = "v.patch_embd:w,3,k,k v.patch_embd.weight.1=:w,3,k,k "
_PIXTRAL: Final = "v.patch_embd:w,3,k,k v.pre_ln:w mm.1+:t,w mm.2+:t,t mm.input_norm:w mm.patch_merger:w,m "
_WHISPER: Final = (
    "a.conv1d.1.weight=:w,b,3 a.conv1d.1.bias=:w,1 a.conv1d.2.weight=:w,w,3 a.conv1d.2.bias=:w,1 "
    "a.position_embd:1500,w a.post_ln+:w "
)
_KEYLESS: Final = _PLAIN.replace("attn_k+", "attn_k")
_TO_MODEL: Final = "mm.0+:m,m mm.2+:t,m"
_QWEN3: Final = _TWO_FRAMES + "v.patch_embd.bias=:w v.position_embd:s,w v.post_ln+:w " + _TO_MODEL + " "
_HALF_SECTIONS: Final = {"rope.dimension_sections": [2, 1, 1, 0]}
"""For models that rotate 8 values of a head."""
_GLM4V: Final = (
    _TWO_FRAMES + "v.patch_embd.bias=:w v.norm_embd:w v.position_embd:s,w v.post_ln:w mm.patch_merger+:t,w,2,2 "
    "mm.model.fc:t,t mm.post_norm+:t mm.up:f,t mm.gate:f,t mm.down:t,f"
)
_FRAMES: Final = (
    "a.conv1d.0.weight=:4,1,3,3 a.conv1d.2.weight=:4,1,3,3 a.conv1d.3.weight=:4,4,1,1 a.conv1d.5.weight=:4,1,3,3 "
    "a.conv1d.6.weight=:4,4,1,1 a.conv1d.0.bias=:4,1,1 a.conv1d.2.bias=:4,1,1 a.conv1d.3.bias=:4,1,1 "
    "a.conv1d.5.bias=:4,1,1 a.conv1d.6.bias=:4,1,1 a.pre_encode.out+:w,40 "
)
"""Tensors that turn eight audio frames into one token, for a conformer."""
_CONFORMER: Final = (
    _NORMS + "ffn_norm+:w ffn_norm_1+:w norm_conv+:w conv_norm+:w ffn_up{0}:f,w ffn_down{0}:w,f ffn_up_1{0}:f,w "
    "ffn_down_1{0}:w,f conv_pw1{0}:2w,w conv_pw2{0}:w,w "
)
_PLACES: Final = "pos_bias_u=:2,h pos_bias_v=:2,h linear_pos:w,{0} "
_QUERIES: Final = "".join(
    f"a.proj_blk.{layer}.{part} "
    for layer in range(2)
    for part in (
        *(f"{kind}_attn_{each}+:w,w" for kind in ("self", "cross") for each in ("q", "k", "v", "out")),
        *("self_attn_norm+:w", "cross_attn_norm+:w", "ffn_up+:f,w", "ffn_down+:w,f", "ffn_norm+:w"),
    )
)
_CONVNEXT: Final = (
    "v.stage.{0}.blk.0.dw+:{1},1,7,7 v.stage.{0}.blk.0.ln+:{1} v.stage.{0}.blk.0.pw1+:{2},{1} v.stage.{0}.blk.0.grn+:{2} "
    "v.stage.{0}.blk.0.pw2+:{1},{2} "
)
_LOCAL: Final = "attn_q+:w,w attn_k+:w,w attn_v+:w,w attn_out:w,w " + _GATED
_SAM_LAYER: Final = (
    "attn.qkv+:48,16 attn.out+:16,16 pre_ln+:16 post_ln+:16 attn.pos_h:15,16 attn.pos_w:15,16 mlp.lin1+:32,16 "
    "mlp.lin2+:16,32"
)
_SAM: Final = (
    "v.sam.pos_embd:16,16,16 v.sam.patch_embd+:16,3,16,16 v.sam.neck.0:16,16,1,1 v.sam.neck.1+:16 v.sam.neck.2:16,16,3,3 "
    "v.sam.neck.3+:16 v.sam.net_2:16,16,3,3 v.sam.net_3:w,16,3,3 v.view_seperator=:t "
    + "".join(
        f"v.sam.blk.{layer}.{part} "
        for layer in range(3)  # the third sees the whole picture
        for part in _SAM_LAYER.split()
    )
)
_SAM_KEYS: Final[dict[str, Content]] = {
    "sam.block_count": 3,
    "sam.head_count": 1,
    "sam.embedding_length": 16,
    "window_size": 8,
}
_MERGER: Final = "mm.0+:f,m mm.2+:t,f"
_PIXELS: Final[dict[str, Content]] = {"image_min_pixels": 4096, "image_max_pixels": 65536}
_SCALE: Final[dict[str, Content]] = {"projector.scale_factor": 2}
_MERGE: Final[dict[str, Content]] = {"spatial_merge_size": 2}


MEL_BINS: Final = 80
"""Values of an audio frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An encoder by libmtmd's name for its projector, and the ``models`` of ``tools/synth.py`` for which it is made.

    ``layer`` has the tensors of a layer, ``others`` the rest, ``keys`` the keys under ``clip.vision``; keys with a full
    name are used as they are.
    A picture of any size becomes ``side`` squared pixels unless the encoder ``fits`` the picture. Patches are ``patch``
    pixels wide; ``merge`` squared patches are one token for the model.
    """

    models: tuple[str, ...]
    others: str
    layer: str = _PLAIN
    keys: Mapping[str, Content] = field(default_factory=dict)
    side: int = 64
    patch: int = 8
    merge: int = 2
    layers: int = 2
    model_width: int = 0
    """Required width of the models; 0: any."""
    looks_ahead: bool = False
    """Whether each token of a picture attends to all of them."""
    values: Mapping[str, list[int]] = field(default_factory=dict)
    """Additional metadata of the models, without their prefix."""
    projector: str = ""
    """llama.cpp's name of it, if different."""
    layout: str = ""
    """Layout of a picture's tokens, where positions have parts."""
    hears: bool = False
    """Whether it takes audio; its keys are then under ``clip.audio``."""
    activation: str = "use_gelu"
    words: tuple[str, ...] = ()
    """Tokens of the model around a picture or its parts."""


FAMILIES: Final[dict[str, Family]] = {
    "gemma3": Family(
        models=("gemma3",), others=_STEM + "mm.input_projection:w,t mm.soft_emb_norm:w", keys=_SCALE, looks_ahead=True
    ),
    "janus_pro": Family(models=("llama",), others=_STEM + "mm.0+:t,w mm.1+:t,t", side=32, merge=1),
    "mlp": Family(models=("llama",), others=_CLASS + "mm.0+:t,w mm.2+:t,t", merge=1, layers=3),
    "ldp": Family(
        models=("llama",),
        others=_CLASS
        + "mm.model.mlp.1+:t,w mm.model.mlp.3+:t,t "
        + " ".join(
            f"mm.model.mb_block.{block}.block.{part}"
            for block in (1, 2)
            for part in ("0.0:t,1,3,3", "0.1+:t", "1.fc1+:f,t", "1.fc2+:t,f", "2.0:t,t", "2.1+:t")
        ),
        side=96,
        patch=4,
        layers=3,
    ),
    "ldpv2": Family(
        models=("llama",),
        others=_CLASS + "mm.model.mlp.0+:t,w mm.model.mlp.2+:t,t mm.model.peg.0+:t,1,3,3",
        side=96,
        patch=4,
        layers=3,
    ),
    "pixtral": Family(
        models=("mistral3",),
        others=_PIXTRAL + "v.token_embd.img_break=:t",
        layer=_BARE + _GATED,
        keys=_MERGE,
        activation="use_silu",
    ),
    "lightonocr": Family(
        models=("qwen3",), others=_PIXTRAL, layer=_BARE + _GATED, keys=_MERGE, side=128, activation="use_silu"
    ),
    "llama4": Family(
        models=("llama4",),
        others="v.patch_embd:w,a v.class_embd=:w v.position_embd:c,w v.pre_ln+:w v.post_ln+:w "
        "mm.model.mlp.1:f,m mm.model.mlp.2:f,f mm.model.fc:t,f",
        keys=_SCALE,
    ),
    "internvl": Family(
        models=("internlm2",),
        others="v.patch_embd+:w,3,k,k v.class_embd=:w v.position_embd:c,w "
        "mm.model.mlp.0+:m mm.model.mlp.1+:t,m mm.model.mlp.3+:t,t",
        keys={**_SCALE, "preproc_min_tiles": 1, "preproc_max_tiles": 4},
    ),
    "idefics3": Family(
        models=("smollm3",),
        others=_STEM + "mm.model.fc:t,m",
        keys={**_SCALE, "preproc_image_size": 128},
        words=("\n\n", "<fake_token_around_image>", "<global-img>"),
    ),
    "lfm2": Family(models=("lfm2",), others=_STEM + "mm.input_norm+:m mm.1+:f,m mm.2+:t,f", keys=_SCALE),
    "kimivl": Family(models=("deepseek2",), others=_STEM + "mm.input_norm+:w mm.1+:f,m mm.2+:t,f", keys=_SCALE),
    "kimik25": Family(
        models=("deepseek2",),
        others="v.patch_embd+:w,3,k,k v.position_embd:8,8,w v.post_ln+:w mm.input_norm+:w mm.1+:f,m mm.2+:t,f",
        keys=_SCALE,
    ),
    "minicpmv4_6": Family(
        models=("qwen35",),
        others="v.patch_embd+:w,3,k,k v.position_embd:4900,w v.post_ln+:w v.vit_merger.ln1+:w v.vit_merger.attn_q+:w,w "
        "v.vit_merger.attn_k+:w,w v.vit_merger.attn_v+:w,w v.vit_merger.attn_out+:w,w v.vit_merger.ds_ln+:4w "
        "v.vit_merger.ds_ffn_up+:f,4w v.vit_merger.ds_ffn_down+:w,f mm.input_norm+:4w mm.up+:f,4w mm.down+:t,f",
        keys={"projector.scale_factor": 4, "wa_layer_indexes": [0]},
        merge=4,
        layout="line",
        words=("<image>", "</image>", "<slice>", "</slice>"),
    ),
    "mlp with norms": Family(
        projector="mlp", models=("llama",), others=_CLASS + "mm.0+:t,w mm.1+:t mm.3+:t,t mm.4+:t", merge=1, layers=3
    ),
    "adapter": Family(
        models=("chatglm",),
        others=_STEM + "adapter.conv+:f,w,2,2 adapter.linear.linear:t,f adapter.linear.norm1+:t "
        "adapter.linear.dense_h_to_4h:f,t adapter.linear.gate:f,t adapter.linear.dense_4h_to_h:t,f adapter.boi=:1,t "
        "adapter.eoi=:1,t",
    ),
    "step3vl": Family(
        models=("qwen3",),
        others=_STEM + "mm.0+:f,w,3,3 mm.1+:f,f,3,3 mm.model.fc:t,f",
        keys={"projector.scale_factor": 4},
        side=728,
        patch=14,
        merge=4,
        words=("<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
    ),
    "phi4": Family(models=("phi3",), others=_STEM + "mm.0+:t,w mm.2+:t,t", keys=_PIXELS, merge=1),
    "gemma4v": Family(
        models=("gemma4", "gemma4-per-layer"),
        others="v.patch_embd:w,3,k,k v.position_embd:2,s,w mm.input_projection:t,w v.std_bias=:w v.std_scale=:w",
        layer=_BARE + _GATED + " attn_q_norm:h attn_k_norm:h attn_post_norm:w ffn_post_norm:w",
        keys=_SCALE,
        looks_ahead=True,
        side=256,
    ),
    "gemma4uv": Family(
        models=("gemma4",),
        others="v.patch_norm.1+:4a v.patch_embd+:w,4a v.patch_norm.2+:w v.patch_norm.3+:w v.position_embd:2,s,w "
        "mm.input_projection:t,w",
        keys=_SCALE,
        looks_ahead=True,
        side=256,
        layers=0,
    ),
    "nemotron_v2_vl": Family(
        models=("nemotron_h",),
        others="v.patch_embd:w,3,k,k v.class_embd=:2,w v.position_embd:s,w "
        "mm.model.mlp.0:m mm.model.mlp.1:f,m mm.model.mlp.3:t,f",
        keys=_SCALE,
    ),
    "dots_ocr": Family(
        models=("qwen2",),
        others="v.patch_embd+:w,3,k,k mm.input_norm+:w mm.post_norm:w " + _MERGER,
        layer=_BARE + _GATED,
        keys={**_SCALE, **_PIXELS},
        activation="use_silu",
    ),
    "exaone4_5": Family(
        models=("exaone4",),
        others=_TWO_FRAMES + "v.post_ln:w mm.0+:m,m mm.2+:t,m",
        layer=_FUSED + _GATED,
        keys={**_MERGE, **_PIXELS, "attention.head_count_kv": 2},
        activation="use_silu",
    ),
    "minimax_m3": Family(
        models=("minimax-m3",),
        others=_TWO_FRAMES + "mm.1+:t,w mm.2+:t,t mm.merger.fc1+:t,4t mm.merger.fc2+:t,t",
        keys=_MERGE,
    ),
    "muse-glimmer": Family(
        models=("muse-glimmer",),
        others="v.patch_embd:w,3,k,k v.position_embd:s,w v.pre_ln+:w v.post_ln+:w mm.0:f,m mm.1:f,f mm.2:t,f",
        keys=_MERGE,
    ),
    "youtuvl": Family(
        models=("deepseek2",),
        others="v.patch_embd+:w,a v.post_ln+:w mm.input_norm:w " + _MERGER,
        keys={**_MERGE, "window_size": 32, "wa_layer_indexes": [1]},
    ),
    "ultravox": Family(
        models=("llama",),
        others=_WHISPER + "mm.a.norm_pre:4w mm.a.mlp.1:2f,4w mm.a.norm_mid:f mm.a.mlp.2:t,f",
        layer=_KEYLESS,
        keys={"projector.stack_factor": 4},
        hears=True,
    ),
    "voxtral": Family(
        models=("llama",),
        others=_WHISPER + "mm.a.mlp.1:t,2w mm.a.mlp.2:t,t",
        layer=_KEYLESS,
        keys={"projector.stack_factor": 2},
        hears=True,
    ),
    "qwen2a": Family(models=("qwen2",), others=_WHISPER + "mm.a.fc+:t,w", layer=_KEYLESS, hears=True),
    "qwen2a of parts": Family(
        projector="qwen2a",
        models=("qwen2vl",),
        others=_WHISPER + "mm.a.fc+:t,w",
        layer=_KEYLESS,
        hears=True,
        layout="line",
    ),
    "musicflamingo": Family(
        models=("qwen2",), others=_WHISPER + "mm.a.mlp.1+:t,w mm.a.mlp.2+:t,t", layer=_KEYLESS, hears=True
    ),
    "meralion": Family(
        models=("gemma2",),
        others=_WHISPER + "mm.a.norm_pre+:15w mm.a.mlp.0+:f,15w mm.a.mlp.1+:f,f mm.a.mlp.2+:f,f mm.a.mlp.3+:t,f",
        layer=_KEYLESS,
        keys={"projector.stack_factor": 15},
        hears=True,
    ),
    "glma": Family(
        models=("llama",),
        others=_WHISPER + "mm.a.norm_pre+:w mm.a.mlp.1+:f,4w mm.a.mlp.2+:t,f v.boi=:1,t v.eoi=:1,t",
        layer=_KEYLESS,
        keys={"projector.stack_factor": 4},
        hears=True,
    ),
    "qwen3a": Family(
        models=("qwen3",),
        others="a.conv2d.1.weight=:4,1,3,3 a.conv2d.1.bias=:4 a.conv2d.2.weight=:4,4,3,3 a.conv2d.2.bias=:4 "
        "a.conv2d.3.weight=:4,4,3,3 a.conv2d.3.bias=:4 a.conv_out:w,40 a.position_embd:1500,w a.post_ln+:w "
        "mm.a.mlp.1+:w,w mm.a.mlp.2+:t,w",
        keys={"num_mel_bins": 80},
        hears=True,
    ),
    "gemma4a": Family(
        models=("gemma4",),
        others="a.conv1d.0.weight=:16,1,3,3 a.conv1d.0.norm:16 a.conv1d.1.weight=:8,16,3,3 a.conv1d.1.norm:8 "
        "a.input_projection:w,160 a.pre_encode.out+:w,w mm.a.soft_emb_norm:w mm.a.input_projection:t,w",
        layer=_BARE
        + "attn_pre_norm:w attn_post_norm:w attn_k_rel:w,w per_dim_scale:h ffn_norm:w ffn_up:f,w ffn_down:w,f "
        "ffn_post_norm:w conv_norm:w norm_conv:w conv_pw1:2w,w conv_dw:w,5 conv_pw2:w,w ffn_norm_1:w ffn_up_1:f,w "
        "ffn_down_1:w,f ffn_post_norm_1:w ln2:w",
        hears=True,
    ),
    "gemma4ua": Family(
        models=("gemma4",), others="mm.a.input_projection:t,640", keys={"num_mel_bins": 640}, layers=0, hears=True
    ),
    "qwen2vl_merger": Family(
        models=("qwen2vl",), others=_TWO_FRAMES + "v.post_ln+:w " + _TO_MODEL, keys=_MERGE, layout="grid"
    ),
    "qwen2.5vl_merger": Family(
        models=("qwen2vl",),
        others=_TWO_FRAMES + "v.post_ln:w " + _TO_MODEL,
        layer=_ATTENTION + "ln1:w ln2:w ffn_gate+:f,w ffn_up+:f,w ffn_down+:w,f",
        keys={**_MERGE, "n_wa_pattern": 2},
        layout="grid",
        activation="use_silu",
    ),
    "qwen3vl_merger": Family(
        models=("qwen35", "qwen35moe"),
        others=_QWEN3,
        layer=_FUSED + _NORMS + "ffn_up+:f,w ffn_down+:w,f",
        keys=_MERGE,
        layout="grid",
    ),
    "qwen3vl_merger of deeper layers": Family(
        projector="qwen3vl_merger",
        models=("qwen3vl", "qwen3vlmoe"),
        others=_QWEN3
        + "".join(
            f"v.deepstack.{layer}.norm+:m v.deepstack.{layer}.fc1+:m,m v.deepstack.{layer}.fc2+:t,m "
            for layer in range(3)
        ),
        layer=_FUSED + _NORMS + "ffn_up+:f,w ffn_down+:w,f",
        keys=_MERGE,
        layers=3,
        layout="grid",
    ),
    "glm4v": Family(
        models=("glm4", "glm4moe"),
        others=_GLM4V,
        layer=_BARE + _GATED,
        keys=_MERGE,
        values=_HALF_SECTIONS,
        layout="grid",
        activation="use_silu",
    ),
    "paddleocr": Family(
        models=("paddleocr",),
        others=_STEM + "mm.input_norm+:w mm.1+:f,m mm.2+:t,f",
        keys=_PIXELS,
        layout="grid",
    ),
    "hunyuanvl": Family(
        models=("hunyuan_vl",),
        others=_STEM
        + "mm.pre_norm:w mm.0+:f,w,2,2 mm.2+:m,f,1,1 v.image_newline=:m mm.model.fc+:t,m mm.image_begin=:t "
        "mm.image_end=:t mm.post_norm:t",
        keys={**_MERGE, **_PIXELS},
        layout="framed",
    ),
    "ling3vl": Family(
        models=("bailingmoe3",),
        others=_TWO_FRAMES + "v.patch_embd.bias=:w v.position_embd:s,w v.post_ln+:w mm.input_norm+:w " + _TO_MODEL,
        keys=_MERGE,
        values=_HALF_SECTIONS,
        layout="grid",
    ),
    "glm5v": Family(
        models=("glm-dsa-full",),
        others=_GLM4V,
        layer=_BARE + _GATED,
        keys={**_MERGE, **_PIXELS, "swiglu_clamp": 7.0},
        activation="use_silu",
    ),
    "mimovl": Family(
        models=("mimo2",),
        others=_TWO_FRAMES + "v.post_ln+:w mm.0:m,m mm.2:t,m",
        layer="attn_qkv+:2w,w attn_out+:w,w attn_sinks=:2 ln1:w ln2:w ffn_gate+:f,w ffn_up+:f,w ffn_down+:w,f",
        keys={**_MERGE, **_PIXELS, "attention.head_count_kv": 1, "window_size": 4, "wa_pattern_mode": [-1, 0, 1]},
        layers=3,
        activation="use_silu",
    ),
    "yasa2": Family(
        models=("llama",),
        others="v.patch_embd+:w,3,k,k v.patch_ln+:w v.vision_pos_embed=:64,2w "
        + _CONVNEXT.format(0, "w", "4w")
        + "v.stage.1.down.ln+:w v.stage.1.down.conv+:2w,w,2,2 "
        + _CONVNEXT.format(1, "2w", "8w")
        + "mm.0+:f,2w mm.2+:t,f",
        patch=4,
        layers=0,
    ),
    "lfm2a": Family(
        models=("lfm2",),
        others=_FRAMES + "a.position_embd:1500,t mm.a.mlp.0+:w mm.a.mlp.1+:f,w mm.a.mlp.3+:t,f",
        layer=_ATTENTION + _CONFORMER.format("+") + _PLACES.format(512) + "conv_dw+:w,9",
        hears=True,
    ),
    "parakeet": Family(
        models=("nemotron_h",),
        others=_FRAMES
        + "a.mel_filters=:20560 a.window=:400 mm.a.norm_pre:w mm.a.mlp.1:f,w mm.a.mlp.2:t,f mm.model.mlp.0:w "
        "mm.model.mlp.1:f,w mm.model.mlp.3:t,f",
        layer=_BARE + _CONFORMER.format("") + _PLACES.format("w") + "conv_dw:w,5 conv_norm_mean=:w conv_norm_var=:w",
        keys={"subsampling_factor": 8, "conv_kernel_size": 5},
        hears=True,
    ),
    "granite_speech": Family(
        models=("granite", "granitehybrid"),
        others="a.input_projection+:w,160 a.enc_ctc_out+:8,w a.enc_ctc_out_mid+:w,8 a.proj_query=:3,w a.proj_norm+:w "
        "a.proj_linear+:t,w " + _QUERIES,
        layer="attn_q:w,w attn_k:w,w attn_v:w,w attn_out+:w,w attn_rel_pos_emb=:33,h conv_dw:w,5 "
        + _CONFORMER.format("+"),
        keys={
            "num_mel_bins": 160,
            "chunk_size": 12,
            "conv_kernel_size": 5,
            "max_pos_emb": 16,
            "projector.window_size": 15,
            "projector.downsample_rate": 5,
            "projector.head_count": 2,
        },
        hears=True,
    ),
    "mimo_audio": Family(
        models=("mimo2",),
        others="a.conv1d.1.weight=:w,b,3 a.conv1d.1.bias=:w,1 a.conv1d.2.weight=:w,w,3 a.conv1d.2.bias=:w,1 a.post_ln+:w "
        "a.downsample.conv:w,w,2 a.downsample.norm+:w a.rvq.codebook:2,16,w mm.a.code_embd:2,16,w mm.a.local_norm:w "
        + "".join(
            f"mm.a.local_blk.0.{part} " for part in f"attn_q+:w,w attn_k+:w,w attn_v+:w,w attn_out:w,w {_GATED}".split()
        )
        + "mm.a.mlp.1:f,4w mm.a.mlp.2:t,f",
        keys={
            "rvq.num_quantizers": 2,
            "rvq.codebook_size": [16, 16],
            "window_size": 8,
            "wa_pattern_mode": [-1, 0, -1],
            "local_block_count": 1,
            "local_group_size": 4,
        },
        layers=3,
        hears=True,
    ),
    "deepseekocr": Family(
        models=("deepseek2-ocr",),
        others=_SAM + "v.position_embd:257,w v.pre_ln+:w v.class_embd=:w v.image_newline=:t mm.model.fc+:t,2w",
        keys=_SAM_KEYS,
    ),
    "deepseekocr2": Family(
        models=("deepseek2-ocr",),
        others=_SAM + "v.post_ln:w v.resample_query_768:144,w v.resample_query_1024:256,w mm.model.fc+:t,w",
        layer="attn_q+:w,w attn_k+:h,w attn_v+:h,w attn_out:w,w " + _GATED,
        keys={**_SAM_KEYS, "attention.head_count_kv": 1},
        activation="use_silu",
    ),
    "resampler": Family(
        models=("minicpm",),
        others="v.patch_embd+:w,3,k,k v.position_embd:4900,w v.post_ln+:w resampler.pos_embed_k=:s,t "
        "resampler.query=:64,t resampler.proj:t,t resampler.kv:t,w resampler.attn.q+:t,t resampler.attn.k+:t,t "
        "resampler.attn.v+:t,t resampler.attn.out+:t,t resampler.ln_q+:t resampler.ln_kv+:t resampler.ln_post+:t",
        keys={"clip.minicpmv_version": 4},
        model_width=128,
        words=("<image>", "</image>", "<slice>", "</slice>"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Eye:
    """The sizes of an encoder, as in ``Family``."""

    width: int = 32
    heads: int = 2
    layers: int = 2
    feed_forward: int = 48
    side: int = 64
    patch: int = 8
    merge: int = 2

    @property
    def rows(self) -> int:
        """Tokens of a picture, if every picture becomes ``side`` squared pixels."""
        return (self.side // self.patch // self.merge) ** 2

    def sizes(self, model_width: int) -> dict[str, int]:
        """Return the values of the letters in lines of tensors."""
        patches = (self.side // self.patch) ** 2
        return {
            "w": self.width, "h": self.width // self.heads, "f": self.feed_forward, "t": model_width, "k": self.patch,
            "a": 3 * self.patch**2, "b": MEL_BINS, "s": patches, "c": patches + 1, "m": self.width * self.merge**2,
        }  # fmt: skip


def eye_of(kind: str) -> Eye:
    """Return the default sizes of ``kind``."""
    family = FAMILIES[kind]
    return Eye(side=family.side, patch=family.patch, merge=family.merge, layers=family.layers)
