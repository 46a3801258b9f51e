"""Which architectures can be cut into windows exactly, and the metadata that a window of one needs.

A window is loaded by llama.cpp's own graph for the architecture, as a model of fewer layers that is fed hidden states. That
is exact only where nothing in the graph depends on the layer's number, on the number of layers or on token ids, beyond
what the window's metadata can say again. So this table is closed: each entry was read in llama.cpp's ``src/models/*.cpp``
(the copy in llama-cpp-python 0.3.36) and its windows were compared with the whole model bit by bit
(``tests/shell/test_cut_exact.py``). A model of another architecture is refused, unless its header has an entry of its own
that ``primad/certify`` derived and compared (``Header.derived``). What the entries say:

- **Embedding.** The head turns tokens into hidden states itself. Gemma 3 scales token rows by sqrt(width) but not hidden
  states; Granite and MiniCPM scale both, so their ``embedding_scale`` is written as 0 (do not scale) in every window. Where
  a graph scales both without a key, refuses hidden states or wants more than one position for each, they go in where it has
  looked up tokens (``is_fed``), or where it has normed those (``entries``; RWKV 6 gives that node no name but its number in
  the graph). Positions that have an embedding of their own (GPT-2) are added by the head.
- **Sliding windows.** The pattern is written out and cut. llama.cpp asserts that a sliding-window model has a layer that
  slides: where the graph of the model without the key is the same one, a window without such a layer drops the key
  (``OPTIONAL``); where the graph always slides, its layers slide over more positions than a context has (``ALWAYS``).
  Cohere 2 rotates sliding layers only, so there an endless rope scaling makes every angle 0. Where layers that slide have
  other heads or angles, each window holds one of them (``NEEDED``), which says where a window may begin (``cut_multiple``).
- **Recurrent layers** remember a state instead of cells. llama.cpp aborts where a window of a hybrid has none of them, or
  no attention, so each window holds both (``cut_multiple``).
- **Inputs without use** make llama.cpp abort: a window needs a layer that rotates (``needs``), or that chooses what
  attention sees (``needs_indexer``). GLM 5.2's layers take over what one before them chose: windows begin at one that does.
- **Inputs of layers** beside the hidden state, which the graph makes of tokens (Gemma 4 E2B, E4B), go from the head along
  with hidden states (``layer_inputs``). Layers that use the KV cells of others are in one window with those: the last one
  (``shares_cells``, ``tail_layers``).
- **Layers for multi-token prediction** behind the others are in no window.
- **Defaults and shapes that llama.cpp derives from the number of layers** (``LLM_TYPE_*``, MiniCPM's residual scale,
  DeepSeek 2 "lite", Gemma 3 27B's attention scale, Command R+'s norms) are written out, or refused where no key exists.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from primad.errors import ModelError
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header, Value, array_value, scalar_value, single

MAX_LAYERS: Final = 512
"""llama.cpp's LLAMA_MAX_LAYERS."""

ADVICE: Final = "serve it on one device alone, or take another model"

_ENDLESS_WINDOW: Final = 1 << 22
"""Positions no context reaches, and times 256 sequences (LLAMA_MAX_SEQ) still within llama.cpp's uint32."""

LAYER_INPUTS: Final = "per_layer_token_embd.weight"
LAYER_PROJECTION: Final = "per_layer_model_proj.weight"
_SHARED: Final = frozenset(("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"))
_LAYER_TENSOR: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.")
_KEPT_GENERAL: Final = frozenset(
    ("general.architecture", "general.name", "general.file_type", "general.quantization_version")
)


class NotCutError(ModelError):
    """The model cannot be cut exactly; ``reason`` says why, the error also what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason


class Embedding(Enum):
    """How llama.cpp turns rows of ``token_embd.weight`` into the first layer's input."""

    PLAIN = "as they are"
    SQRT_WIDTH = "times sqrt(embedding_length)"
    KEY = "times the key embedding_scale"


class Sliding(Enum):
    """Whether the architecture's graph knows sliding-window attention."""

    NEVER = "the key, if there, is ignored"
    OPTIONAL = "slides if the key is there; the same graph otherwise"
    ALWAYS = "always slides: at least one layer has to"
    NEEDED = "at least one layer has to slide, and those that do are made otherwise"
    NEEDED_IF_ANY = "the same if the key is there; without it another graph"
    FIXED = "slides by layer number, as the key says or without it; cuts keep to the pattern"


class Recurrent(Enum):
    """Which layers keep a state in place of cells by position."""

    NEVER = "none"
    INTERVAL = "all but each full_attention_interval-th, or as attention.recurrent_layers says"
    HEADS = "those without KV heads"
    ALL = "every one, beside its cells"
    TENSORS = "those with tensors of a state"
    ONLY = "every one, and none has cells"


class TensorRole(Enum):
    """What a tensor is needed for."""

    LAYER = "the window that holds its layer"
    EMBEDDING = "the head, for its embedding rows"
    LAYER_INPUTS = "the head, for the rows that go to layers; in windows zeros stand for it"
    LAYER_PROJECTION = "every window, the part of its layers"
    POSITIONS = "the head, which adds it to the embedding; in windows a row of 0 stands for it"
    OUTPUT_NORM = "the tail window; in the others a placeholder that is never computed"
    OUTPUT = "the tail window"
    SHARED = "every window"
    UNUSED = "no window"


_OF_INPUTS: Final = {
    LAYER_INPUTS: TensorRole.LAYER_INPUTS,
    LAYER_PROJECTION: TensorRole.LAYER_PROJECTION,
    "per_layer_proj_norm.weight": TensorRole.SHARED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the cutter has to know about one ``general.architecture``."""

    name: str
    tied_output_fallback: bool = True
    """Without ``output.weight`` llama.cpp takes ``token_embd.weight`` as the output matrix."""
    embedding: Embedding = Embedding.PLAIN
    default_embedding_scale: float = 0.0
    """Value llama.cpp takes where the key ``embedding_scale`` is missing; 0 means that nothing is scaled."""
    sliding: Sliding = Sliding.NEVER
    sliding_period: int = 0
    """llama.cpp's default pattern: in each ``sliding_period`` layers the last one does not slide."""
    slides_last: bool = False
    """It is the first one that does not."""
    cut_multiple: int = 1
    """The first layer of every window has to be a multiple of this, and of the key ``step``."""
    step: str = ""
    needs: str = ""
    """A key of flags by layer, of which every window has to have one that is set: llama.cpp aborts over unused inputs."""
    skips_attention: bool = False
    """Layers without KV heads have no attention; every window has to have one that has it, for the same reason."""
    needs_indexer: bool = False
    """Every window has to have a layer that chooses what attention sees, for the same reason."""
    takes_over: bool = False
    """Windows begin at one that does: those behind it may see what it chose."""
    most_sequences: int = 0
    """Answers at once; 0: as many as llama.cpp has. With more nodes for each sequence than it counted on it aborts."""
    is_fed: bool = False
    """Hidden states are no input of the graph; they are put where it has looked up tokens."""
    knows: frozenset[str] = frozenset()
    """Keys that stand in the way of others."""
    refuses: tuple[tuple[str, str], ...] = ()
    """Keys that stand in the way here alone, and why."""
    by_layer: frozenset[str] = frozenset()
    """Keys of one value a layer, which may differ."""
    drops: frozenset[str] = frozenset()
    """Keys that windows do without."""
    recurrent: Recurrent = Recurrent.NEVER
    output_norm: str = "output_norm"
    exit: str = "l_out-{layer}"
    """What the graph calls a layer's output, by the ``layer`` or the one ``after`` it."""
    last_exit: str = ""
    """What it calls the last one's, if otherwise."""
    adds_positions: bool = False
    """The head adds a row of ``position_embd.weight`` to each row of the embedding; in windows this is 0."""
    predicts: bool = False
    """Its last layers may be for multi-token prediction, which the graph leaves out."""
    layer_inputs: str = ""
    """The key of how many values each layer takes beside the hidden state, of rows of ``per_layer_token_embd.weight`` and
    what ``per_layer_model_proj.weight`` makes of the tokens' embedding."""
    shares_cells: str = ""
    """The key of how many layers, the last ones, use the KV cells of the two before them."""
    shares_where_full: bool = False
    """What every window shares is used only by layers that do not slide."""
    entries: tuple[str, ...] = ()
    """What the graph calls the rows of tokens, and the hidden state that it makes of them. Where there are some the route's
    first window is fed at the first one and the others at the last; none: at those that the engine knows."""

    def exit_of(self, layer: int, *, is_last: bool) -> str:
        """What the graph calls the output of ``layer``, counted from the window's first."""
        name = (is_last and self.last_exit) or self.exit
        return name.replace("{layer}", str(layer)).replace("{after}", str(layer + 1))


_SECTIONS: Final = frozenset(("rope.dimension_sections",))
"""Positions of several parts, which are equal for text."""
_DEEPSTACK: Final = frozenset(("n_deepstack_layers",))
"""Layers that take image features."""
_DENSE: Final = frozenset(("leading_dense_block_count",))
"""Which layers have no experts, where tensors say it and the key is not looked at."""
_HEADS: Final = "attention.head_count_kv"
_KV_HEADS: Final = frozenset((_HEADS,))
_RECURRENT: Final = "attention.recurrent_layers"
_STATES: Final = frozenset((_RECURRENT,))
_SLIDING: Final = "attention.sliding_window"
_INDEXERS: Final = "attention.indexer.types"
_GLM_5_2_CONTEXT: Final = 1 << 20
"""Of so many tokens and more llama.cpp takes layers without that key for GLM 5.2's."""
_ROPE: Final = "attention.rope_pattern"
_XIELU: Final = frozenset(f"xielu.{key}" for key in ("alpha_n", "alpha_p", "beta", "eps"))
"""These keys have no prefix."""

SUPPORTED: Final[dict[str, Architecture]] = {
    entry.name: entry
    for entry in (
        Architecture(name="llama"),
        Architecture(name="mistral3"),
        Architecture(name="qwen2"),
        Architecture(name="qwen2moe", tied_output_fallback=False),
        Architecture(name="qwen3"),
        Architecture(name="qwen3moe"),
        Architecture(name="gemma3", embedding=Embedding.SQRT_WIDTH, sliding=Sliding.OPTIONAL, sliding_period=6),
        Architecture(name="phi3"),
        Architecture(name="olmo2", tied_output_fallback=False, sliding=Sliding.OPTIONAL, sliding_period=4),
        Architecture(name="olmoe", tied_output_fallback=False),
        Architecture(name="granite", embedding=Embedding.KEY),
        Architecture(name="granitemoe", embedding=Embedding.KEY),
        Architecture(name="minicpm", embedding=Embedding.KEY, default_embedding_scale=12.0),
        Architecture(name="smollm3", cut_multiple=4),
        Architecture(name="starcoder2"),
        Architecture(name="stablelm", tied_output_fallback=False),
        Architecture(name="internlm2", tied_output_fallback=False),
        Architecture(name="arcee"),
        Architecture(name="seed_oss"),
        Architecture(name="exaone"),
        Architecture(name="exaone4"),
        Architecture(name="command-r"),
        Architecture(name="cohere2", sliding=Sliding.ALWAYS, sliding_period=4),
        Architecture(name="gpt-oss", tied_output_fallback=False, sliding=Sliding.ALWAYS, sliding_period=2),
        Architecture(name="deepseek"),
        Architecture(name="deepseek2", predicts=True),
        Architecture(name="dots1", tied_output_fallback=False),
        Architecture(name="hunyuan-moe"),
        Architecture(name="minimax-m2", tied_output_fallback=False),
        Architecture(
            name="afmoe",
            embedding=Embedding.SQRT_WIDTH,
            sliding=Sliding.OPTIONAL,
            sliding_period=4,
            cut_multiple=4,
            is_fed=True,
        ),
        Architecture(name="apertus", tied_output_fallback=False, by_layer=_XIELU),
        Architecture(name="bailingmoe2", tied_output_fallback=False, predicts=True),
        Architecture(name="chatglm"),
        Architecture(name="ernie4_5", knows=_SECTIONS, is_fed=True),
        Architecture(name="ernie4_5-moe", step="interleave_moe_layer_step", knows=_SECTIONS, is_fed=True),
        Architecture(
            name="exaone-moe", tied_output_fallback=False, sliding=Sliding.NEEDED, sliding_period=4, predicts=True
        ),
        Architecture(name="falcon"),
        Architecture(name="gemma", embedding=Embedding.SQRT_WIDTH, is_fed=True),
        Architecture(
            name="gemma2", embedding=Embedding.SQRT_WIDTH, sliding=Sliding.ALWAYS, sliding_period=2, is_fed=True
        ),
        Architecture(
            name="gemma4",
            embedding=Embedding.SQRT_WIDTH,
            sliding=Sliding.NEEDED,
            is_fed=True,
            knows=frozenset(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")),
            by_layer=_KV_HEADS | {"feed_forward_length"},
            layer_inputs="embedding_length_per_layer_input",
            shares_cells="attention.shared_kv_layers",
            shares_where_full=True,
        ),
        Architecture(name="glm4", knows=_SECTIONS, is_fed=True, predicts=True),
        Architecture(name="glm4moe", knows=_SECTIONS, is_fed=True, predicts=True),
        Architecture(name="grovemoe"),
        Architecture(name="hunyuan-dense"),
        Architecture(name="hy_v3", predicts=True, drops=_DENSE),
        Architecture(
            name="llama4", sliding=Sliding.FIXED, cut_multiple=4, step="interleave_moe_layer_step", is_fed=True
        ),
        Architecture(
            name="mimo2",
            tied_output_fallback=False,
            predicts=True,
            sliding=Sliding.NEEDED,
            by_layer=_KV_HEADS,
        ),
        Architecture(
            name="laguna",
            sliding=Sliding.OPTIONAL,
            sliding_period=4,
            slides_last=True,
            cut_multiple=4,
            knows=frozenset(("rope.dimension_count_swa",)),
        ),
        Architecture(name="mistral4", predicts=True),
        Architecture(name="nemotron", tied_output_fallback=False),
        Architecture(name="phi2", tied_output_fallback=False),
        Architecture(name="phimoe", tied_output_fallback=False),
        Architecture(
            name="step35",
            tied_output_fallback=False,
            sliding=Sliding.NEEDED,
            knows=frozenset(("rope.dimension_count_swa",)),
            by_layer=frozenset((*_KV_HEADS, "attention.head_count", "swiglu_clamp_exp", "swiglu_clamp_shexp")),
            exit="attn_norm_in-{after}",
            last_exit="h_nextn",
            predicts=True,
        ),
        Architecture(name="qwen2vl", knows=_SECTIONS, is_fed=True),
        Architecture(name="qwen3vl", knows=_SECTIONS, is_fed=True, drops=_DEEPSTACK),
        Architecture(name="qwen3vlmoe", knows=_SECTIONS, is_fed=True, drops=_DEEPSTACK),
        Architecture(name="arctic"),
        Architecture(name="bailingmoe", tied_output_fallback=False, drops=_DENSE),
        Architecture(name="bailingmoe3", recurrent=Recurrent.HEADS, by_layer=_KV_HEADS, is_fed=True, predicts=True),
        Architecture(name="bitnet"),
        Architecture(name="codeshell", tied_output_fallback=False),
        Architecture(name="cohere2moe", sliding=Sliding.FIXED, cut_multiple=4, predicts=True),
        Architecture(name="dbrx", tied_output_fallback=False),
        Architecture(name="gptneox", tied_output_fallback=False),
        Architecture(name="grok", embedding=Embedding.KEY, default_embedding_scale=78.38367176906169),
        Architecture(name="jais2"),
        Architecture(name="maincoder"),
        Architecture(
            name="openelm",
            by_layer=_KV_HEADS | {"attention.head_count", "feed_forward_length"},
        ),
        Architecture(name="orion", tied_output_fallback=False),
        Architecture(name="pangu-embedded"),
        Architecture(name="plamo", tied_output_fallback=False),
        Architecture(name="qwen", tied_output_fallback=False),
        Architecture(name="refact"),
        Architecture(name="xverse", tied_output_fallback=False),
        Architecture(name="falcon-h1", recurrent=Recurrent.ALL, is_fed=True),
        Architecture(name="mamba", recurrent=Recurrent.ONLY, is_fed=True),
        Architecture(name="mamba2", recurrent=Recurrent.ONLY, is_fed=True),
        Architecture(
            name="plamo2",
            recurrent=Recurrent.HEADS,
            by_layer=_KV_HEADS | {"attention.head_count"},
            entries=("embedding_output",),
            exit="ffn_residual-{layer}",
            is_fed=True,
        ),
        Architecture(
            name="rwkv6",
            tied_output_fallback=False,
            recurrent=Recurrent.ONLY,
            step="rescale_every_n_layers",
            entries=("embd", "node_22"),
            is_fed=True,
        ),
        Architecture(name="rwkv6qwen2", tied_output_fallback=False, recurrent=Recurrent.ONLY, is_fed=True),
        Architecture(name="jais", tied_output_fallback=False),
        Architecture(name="olmo", output_norm=""),
        Architecture(name="mellum", tied_output_fallback=False, sliding=Sliding.OPTIONAL, sliding_period=4),
        Architecture(name="plamo3", sliding=Sliding.OPTIONAL, sliding_period=8),
        Architecture(
            name="maple", tied_output_fallback=False, sliding=Sliding.NEEDED, by_layer=frozenset(("swiglu_clamp_exp",))
        ),
        Architecture(
            name="spark2_5",
            sliding=Sliding.NEEDED,
            knows=frozenset(("rope.dimension_count_swa",)),
            by_layer=_KV_HEADS | {"attention.head_count"},
        ),
        Architecture(
            name="granite_swa",
            embedding=Embedding.KEY,
            sliding=Sliding.ALWAYS,
            by_layer=_KV_HEADS | {"attention.head_count", _ROPE},
            needs=_ROPE,
        ),
        Architecture(
            name="smallthinker", sliding=Sliding.NEEDED_IF_ANY, sliding_period=4, slides_last=True, cut_multiple=4
        ),
        Architecture(name="hunyuan_vl", knows=_SECTIONS, is_fed=True),
        Architecture(name="paddleocr", knows=_SECTIONS, is_fed=True),
        Architecture(
            name="deci",
            by_layer=_KV_HEADS | {"attention.head_count", "feed_forward_length"},
            skips_attention=True,
        ),
        Architecture(name="deepseek2-ocr"),
        Architecture(name="deepseek32", knows=_SECTIONS, predicts=True),
        Architecture(name="glm-dsa", knows=_SECTIONS, by_layer=frozenset((_INDEXERS,)), takes_over=True, predicts=True),
        Architecture(name="minimax-m3", tied_output_fallback=False, needs_indexer=True, most_sequences=8),
        Architecture(
            name="muse-glimmer",
            tied_output_fallback=False,
            sliding=Sliding.NEEDED,
            sliding_period=4,
            entries=("embd", "embd_norm"),
            is_fed=True,
        ),
        Architecture(name="gpt2", adds_positions=True, is_fed=True),
        Architecture(name="starcoder", adds_positions=True, is_fed=True),
        Architecture(name="mpt", adds_positions=True, is_fed=True),
        Architecture(
            name="granitehybrid",
            embedding=Embedding.KEY,
            recurrent=Recurrent.HEADS,
            by_layer=_KV_HEADS,
            is_fed=True,
        ),
        Architecture(
            name="kimi-linear", tied_output_fallback=False, recurrent=Recurrent.HEADS, by_layer=_KV_HEADS, is_fed=True
        ),
        Architecture(name="jamba", recurrent=Recurrent.HEADS, by_layer=_KV_HEADS, is_fed=True),
        *(
            Architecture(
                name=name,
                output_norm="token_embd_norm",
                recurrent=Recurrent.HEADS,
                by_layer=_KV_HEADS,
                is_fed=True,
                refuses=((_SLIDING, "layers that slide"),),
            )
            for name in ("lfm2", "lfm2moe")
        ),
        *(
            Architecture(
                name=name,
                tied_output_fallback=False,
                recurrent=Recurrent.HEADS,
                exit="nemotron_h_block_out-{layer}",
                by_layer=_KV_HEADS | {"feed_forward_length"},
                is_fed=True,
                predicts=True,
            )
            for name in ("nemotron_h", "nemotron_h_moe")
        ),
        *(
            Architecture(
                name=name,
                knows=_SECTIONS,
                recurrent=Recurrent.INTERVAL,
                by_layer=_STATES,
                is_fed=True,
                predicts=True,
            )
            for name in ("qwen35", "qwen35moe")
        ),
        Architecture(name="qwen3next", recurrent=Recurrent.INTERVAL, by_layer=_STATES, is_fed=True, predicts=True),
    )
}

_REASONS: Final[dict[str, tuple[str, ...]]] = {
    "its layers mix in values of the first one": ("rwkv7", "arwkv7"),
    "its layers hand on several hidden states at once, and the first pick experts by token": ("deepseek4",),
    "llama.cpp tells its layers apart by number: the first 10, and those from 20 on": ("gemma3n",),
    "its layers take inputs beside the hidden state": ("talkie",),
    "its layers are scaled by the number of layers": ("minicpm3", "minimax-01"),
    "its layers are computed more than once": ("hrm_text", "nanbeige"),
    "llama.cpp aborts in its attention": ("plm",),
    "it is not a causal text decoder": (
        *(
            "bert",
            "nomic-bert",
            "nomic-bert-moe",
            "modern-bert",
            "neo-bert",
            "jina-bert-v2",
            "jina-bert-v3",
            "eurobert",
        ),
        *("gemma-embedding", "llama-embed", "t5", "t5encoder", "llada", "llada-moe", "rnd1"),
    ),
}
_REFUSED: Final = {name: reason for reason, names in _REASONS.items() for name in names}

_INTERVAL: Final = "full_attention_interval"
_DEEPSEEK2: Final = frozenset(("deepseek2", "mistral4"))
"""Told apart by the number of layers, among other things."""

_PER_LAYER: Final = (
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_used_count",
    "attention.head_count",
    "attention.head_count_kv",
)
"""Keys that may be an array over the layers. The graphs above read layer 0 for all, so only equal values are exact."""

ENTRY_KEY: Final = "primad.entry"
EXIT_KEY: Final = "primad.exit"
LAST_EXIT_KEY: Final = "primad.last_exit"
"""Keys of a window that no table knows: where its graph is fed, and what its layers' outputs are called there."""
_STATE_TENSOR: Final = re.compile(r"blk\.(\d+)\.(ssm|shortconv|time_mix)")
_KEY_TENSOR: Final = re.compile(r"blk\.(\d+)\.attn_(k|kv_a_mqa)\b")

_FOREIGN: Final = (
    ("attention.key_length_swa", "sliding layers with heads of another size"),
    ("attention.value_length_swa", "sliding layers with heads of another size"),
    ("rope.dimension_count_swa", "sliding layers that rotate another number of dimensions"),
    ("rope.dimension_sections", "rotary positions of several sections"),
    ("deepstack_mapping", "layers that take image features"),
    ("pooling_type", "pooled output: this is an embedding model"),
    ("classifier.output_labels", "a classifier's output"),
)
LEFT_TO_TRIAL: Final = frozenset(key for key, _ in _FOREIGN) - {"pooling_type", "classifier.output_labels"}
"""Keys that stand in the way of an entry of the table, and with which a derived one is tried."""


def known(header: Header) -> Architecture | None:
    """The model's entry: the one that was derived for it, or the table's; None where there is neither."""
    return header.derived or SUPPORTED.get(header.text("general.architecture"))


def is_unknown(header: Header) -> bool:
    """Whether nothing is known of the architecture, not even that it cannot be cut."""
    name = header.text("general.architecture")
    return name not in SUPPORTED and name not in _REFUSED


def why_whole(header: Header) -> str:
    """Why the model cannot be cut. Empty where it can, and for a file that is no complete model: that is told where it is
    read.
    """
    try:
        cuttable(header)
    except NotCutError as exc:
        return exc.reason
    except ModelError:
        pass
    return ""


def cuttable(header: Header) -> Architecture:
    """The entry for the model, after checking that this very model can be cut exactly.

    Raises ``ModelError`` naming the architecture, the key or the tensor that stands in the way, and what to do.
    """
    name = header.text("general.architecture")
    architecture = known(header)
    if architecture is None:
        raise _refusal(header, f"architecture {name[:64]!r}", _REFUSED.get(name, "it is not known to be exact"))
    layers = layer_count(header)
    if not architecture.predicts and _is_set(header, f"{name}.nextn_predict_layers"):
        raise _refusal(
            header, f"key '{name}.nextn_predict_layers'", "its graph has no layers for multi-token prediction"
        )
    for key, meaning in (*_FOREIGN, *architecture.refuses):
        if key not in architecture.knows and _is_set(header, f"{name}.{key}"):
            raise _refusal(header, f"key '{name}.{key}'", f"it means {meaning}")
    if header.values.get(f"{name}.attention.causal", scalar_value(GGUFValueType.BOOL, True)).raw == b"\0":
        raise _refusal(header, f"key '{name}.attention.causal'", "attention that is not causal needs the whole prompt")
    if "general.tensor_extra.name" in header.values:
        raise _refusal(header, "key 'general.tensor_extra.name'", "it sets the precision of tensors by layer number")
    _check_arrays(header, architecture)
    _check_count(header, architecture, layers)
    _check_inputs(header, layers)
    slides = sliding_layers(header)
    if name == "laguna" and any(slides) and slides != tuple(layer % 4 > 0 for layer in range(layers)):
        reason = "llama.cpp rotates layers that do not slide as a window's first layer does"
        raise _refusal(header, f"key '{name}.{_SLIDING}_pattern'", reason)
    present = set()
    for tensor in header.tensors:
        role = tensor_role(header, tensor)
        if role is TensorRole.LAYER:
            present.add(layer_of(tensor))
    missing = sorted(set(range(layers)) - present)
    if missing:
        raise ModelError(f"{header.path}: layer {missing[0]} has no tensors; the file is not a complete model")
    needed = ["token_embd.weight"]
    if architecture.output_norm:
        needed.append(f"{architecture.output_norm}.weight")
    if not architecture.tied_output_fallback:
        needed.append("output.weight")
    for tensor in needed:
        if tensor not in header.tensors:
            raise ModelError(f"{header.path}: tensor '{tensor}' is missing; the file is not a complete model")
    return architecture


def layer_count(header: Header) -> int:
    """Number of layers, without those for multi-token prediction, which come last.

    Raises ``ModelError`` when a key is missing or not a number llama.cpp accepts.
    """
    name = header.text("general.architecture")
    predicting = header.count(f"{name}.nextn_predict_layers", 0, most=MAX_LAYERS)
    layers = block_count(header)
    if predicting >= layers:
        raise ModelError(
            f"{header.path}: metadata key '{name}.nextn_predict_layers' leaves none of {layers} layers; the file is not a "
            "complete model"
        )
    return layers - predicting


def block_count(header: Header) -> int:
    """Number of all layers. Raises ``ModelError`` as ``layer_count``."""
    key = f"{header.text('general.architecture')}.block_count"
    layers = header.count(key, most=MAX_LAYERS)
    if layers == 0:
        raise ModelError(f"{header.path}: metadata key '{key}' is 0; the file is not a complete model")
    return layers


def borders(header: Header) -> range:
    """The layers at which windows behind the first may begin; any for a model that cannot be cut.

    Raises ``ModelError`` as ``sliding_layers``.
    """
    layers, architecture, multiple = layer_count(header), known(header), _multiple(header)
    chooses = indexed_layers(header) if architecture is not None and architecture.takes_over else ()
    if not any(chooses):
        return range(multiple, layers - tail_layers(header) + 1, multiple)
    for step in range(1, layers):
        for first in (step, *range(1, step)):
            if all(chooses[first::step]):
                return range(first, layers, step)
    return range(layers, layers, layers)


def cut_multiple(header: Header) -> int:
    """How many layers lie between two ``borders`` that follow each other."""
    return borders(header).step


def _multiple(header: Header) -> int:
    """The least multiple of layers at which each window that begins there has what it needs."""
    architecture = known(header)
    if architecture is None:
        return 1
    step = header.count(f"{architecture.name}.{architecture.step}", 1) if architecture.step else 1
    multiple = base = math.lcm(architecture.cut_multiple, max(step, 1))
    slides = sliding_layers(header)
    behind = layer_count(header) - tail_layers(header) + 1 if architecture.shares_cells else len(slides)
    needs = architecture.sliding is Sliding.NEEDED or (architecture.sliding is Sliding.NEEDED_IF_ANY and any(slides))
    needed = [slides] if needs else []
    if architecture.needs and f"{architecture.name}.{architecture.needs}" in header.values:
        needed.append(tuple(map(bool, _by_layer(header, architecture.needs, layer_count(header)))))
    if architecture.skips_attention:
        needed.append(attending_layers(header))
    if architecture.needs_indexer and any(indexed_layers(header)):
        needed.append(indexed_layers(header))
    if architecture.recurrent in (Recurrent.INTERVAL, Recurrent.HEADS, Recurrent.TENSORS):
        kinds = (recurrent_layers(header), attending_layers(header))
        needed += [each for each in kinds if any(each) or architecture.recurrent is not Recurrent.TENSORS]
        if architecture.recurrent is Recurrent.INTERVAL and f"{architecture.name}.{_RECURRENT}" not in header.values:
            multiple = base = math.lcm(base, max(header.count(f"{architecture.name}.{_INTERVAL}", 4), 1))
    while True:
        multiple = _multiple_with([each[:behind] for each in needed], multiple, base)
        if multiple >= len(slides) or _is_border(header, architecture, multiple, slides=any(slides)):
            return multiple
        multiple += base


def tail_layers(header: Header) -> int:
    """How many layers the last of several windows has at the least. Raises ``ModelError`` as ``sharing_layers``."""
    sharing = sharing_layers(header)
    return sharing + 2 if sharing else 1


def sharing_layers(header: Header) -> int:
    """How many layers, the last ones, use the KV cells of others. Raises ``ModelError`` for what is no count."""
    architecture = known(header)
    key = architecture.shares_cells if architecture is not None else ""
    return header.count(f"{header.text('general.architecture')}.{key}", 0, most=MAX_LAYERS) if key else 0


def layer_inputs(header: Header) -> int:
    """Values that each layer takes beside the hidden state; 0 for most. Raises ``ModelError`` for what is no count."""
    architecture = known(header)
    key = architecture.layer_inputs if architecture is not None else ""
    return header.count(f"{header.text('general.architecture')}.{key}", 0, most=1 << 16) if key else 0


def _is_border(header: Header, architecture: Architecture, multiple: int, *, slides: bool) -> bool:
    """Whether windows may begin at each multiple of ``multiple`` where llama.cpp looks at the number of layers: of
    SmallThinker with 4 it rotates all, not three of four. Or at the first one's heads, without which it knows no width of
    any."""
    layers = layer_count(header)
    heads = header.values.get(f"{architecture.name}.attention.head_count")
    if architecture.skips_attention and heads is not None and heads.is_array:
        return all(_by_layer(header, "attention.head_count", layers)[multiple::multiple])
    return architecture.name != "smallthinker" or not slides or (multiple != 4 and layers % multiple != 4)


def multiple_that_slides(header: Header) -> int:
    """With windows that begin at multiples of this every one has a layer that slides, where the graph always slides.

    1 where it does not. Raises ``ModelError`` as ``sliding_layers``.
    """
    architecture = known(header)
    always = architecture is not None and architecture.sliding is Sliding.ALWAYS
    return _multiple_with([sliding_layers(header)], 1, 1) if always else 1


def _multiple_with(needed: list[tuple[bool, ...]], multiple: int, base: int) -> int:
    """The least multiple of ``base``, from ``multiple`` on, at which each of ``needed`` has a layer in every window."""
    layers = max(map(len, needed), default=0)
    while multiple < layers and not all(
        any(each[first : first + multiple]) for each in needed for first in range(0, layers, multiple)
    ):
        multiple += base
    return multiple


def recurrent_layers(header: Header) -> tuple[bool, ...]:
    """For each layer whether it keeps a state. Raises ``ModelError`` for a key that is of another kind than known."""
    name, layers = header.text("general.architecture"), layer_count(header)
    match kind := _recurrent(header, name):
        case Recurrent.INTERVAL:
            given = header.values.get(f"{name}.{_RECURRENT}")
            if given is not None and given.is_array:
                return tuple(map(bool, _by_layer(header, _RECURRENT, layers)))
            interval = header.count(f"{name}.{_INTERVAL}", 4)
            return tuple(interval == 0 or (layer + 1) % interval != 0 for layer in range(layers))
        case Recurrent.HEADS:
            heads, forward = _by_layer(header, _HEADS, layers), [0] * layers
            given = header.values.get(f"{name}.feed_forward_length")
            if "feed_forward_length" in SUPPORTED[name].by_layer and given is not None and given.is_array:
                forward = _by_layer(header, "feed_forward_length", layers)  # a layer of a forward network alone
            return tuple(not any(each) for each in zip(heads, forward, strict=True))
        case Recurrent.TENSORS:
            return _with_tensors(header, _STATE_TENSOR, layers)
        case _:
            return (kind in (Recurrent.ALL, Recurrent.ONLY),) * layers


def attending_layers(header: Header) -> tuple[bool, ...]:
    """For each layer whether it has cells by position. Raises as ``recurrent_layers``."""
    name, layers = header.text("general.architecture"), layer_count(header)
    if name in SUPPORTED and SUPPORTED[name].skips_attention:
        heads = header.values.get(f"{name}.{_HEADS}")
        return tuple(map(bool, _by_layer(header, _HEADS, layers))) if heads and heads.is_array else (True,) * layers
    match _recurrent(header, name):
        case Recurrent.HEADS:
            return tuple(heads > 0 for heads in _by_layer(header, _HEADS, layers))
        case Recurrent.INTERVAL:
            return tuple(not state for state in recurrent_layers(header))
        case Recurrent.TENSORS:
            both = zip(recurrent_layers(header), _with_tensors(header, _KEY_TENSOR, layers), strict=True)
            return tuple(has_key or not state for state, has_key in both)
        case _:
            return (_recurrent(header, name) is not Recurrent.ONLY,) * layers


def indexed_layers(header: Header) -> tuple[bool, ...]:
    """For each layer whether it has an indexer of its own, which chooses the positions that attention sees, and a cache of
    keys for it. Raises as ``recurrent_layers``."""
    name, layers = header.text("general.architecture"), layer_count(header)
    if f"{name}.attention.indexer.key_length" not in header.values:
        return (False,) * layers
    if name == "minimax-m3":
        dense = header.count(f"{name}.leading_dense_block_count", 0)
        return tuple(layer >= dense for layer in range(layers))
    types = header.values.get(f"{name}.{_INDEXERS}")
    if name != "glm-dsa" or (types is not None and not types.is_array):
        return (True,) * layers
    if types is not None:
        return tuple(map(bool, _by_layer(header, _INDEXERS, layers)))
    is_old = header.count(f"{name}.context_length") < _GLM_5_2_CONTEXT
    return tuple(is_old or layer < 2 or layer % 4 == 2 for layer in range(layers))


def _with_tensors(header: Header, pattern: re.Pattern[str], layers: int) -> tuple[bool, ...]:
    """For each layer whether it has a tensor of such a name."""
    found = {int(match[1]) for match in map(pattern.match, header.tensors) if match is not None}
    return tuple(layer in found for layer in range(layers))


def _recurrent(header: Header, name: str) -> Recurrent:
    """Of an architecture that is not known, that every layer keeps a state if one does."""
    entry = known(header)
    if entry is not None:
        return entry.recurrent
    keeps = any(key.startswith((f"{name}.ssm.", f"{name}.wkv.")) for key in header.values)
    return Recurrent.ALL if keeps else Recurrent.NEVER


def _by_layer(header: Header, short: str, layers: int) -> list[int]:
    """The whole numbers, or flags, of a key that has one for each layer at least."""
    key = f"{header.text('general.architecture')}.{short}"
    value = header.values.get(key)
    items = value.items() if value is not None and value.is_array else []
    if len(items) < layers or not all(isinstance(each, int) for each in items):
        raise _refusal(header, f"key '{key}'", f"one count for each of {layers} layers is expected")
    return [int(each) for each in items[:layers]]


def layer_of(tensor: str) -> int | None:
    """The layer a tensor name belongs to (``blk.N.``), or None."""
    match = _LAYER_TENSOR.match(tensor)
    return int(match[1]) if match else None


def is_shared_tensor(tensor: str) -> bool:
    """Whether ``tensor`` is one of the small ones outside the layers that every window needs."""
    return tensor in _SHARED


def tensor_role(header: Header, tensor: str) -> TensorRole:
    """What ``tensor`` is needed for. Raises ``ModelError`` by name for one outside the layers that is not known."""
    layer = layer_of(tensor)
    if layer is not None:
        if layer >= block_count(header):
            raise _refusal(header, f"tensor '{tensor}'", f"the model has {block_count(header)} layers")
        return TensorRole.LAYER if layer < layer_count(header) else TensorRole.UNUSED
    match tensor:
        case "token_embd.weight":
            return TensorRole.EMBEDDING
        case "output_norm.weight" | "output_norm.bias":
            return TensorRole.OUTPUT_NORM
        case "token_embd_norm.weight" if _output_norm(header) == "token_embd_norm":
            return TensorRole.OUTPUT_NORM
        case "token_embd_norm.weight" | "token_embd_norm.bias" if _norms_tokens(header):
            return TensorRole.SHARED
        case "position_embd.weight" if _adds_positions(header):
            return TensorRole.POSITIONS
        case _ if layer_inputs(header) and tensor in _OF_INPUTS:
            return _OF_INPUTS[tensor]
        case "output.weight" | "output.bias":
            return TensorRole.OUTPUT
        case _ if is_shared_tensor(tensor) or header.derived is not None or is_unknown(header):
            return TensorRole.SHARED
        case _:
            raise _refusal(header, f"tensor '{tensor}'", "it is outside the layers and its use is not known")


def _norms_tokens(header: Header) -> bool:
    entry = known(header)
    return entry is not None and len(entry.entries) > 1


def _adds_positions(header: Header) -> bool:
    entry = known(header)
    return entry is not None and entry.adds_positions


def _output_norm(header: Header) -> str:
    entry = known(header)
    return entry.output_norm if entry is not None else ""


def embedding_scale(header: Header) -> float:
    """What the head multiplies embedding rows with, in float32; the value itself is exact in float32.

    1.0 means: do not multiply; where the entry was derived the graph itself does. The model must be ``cuttable``.
    """
    name, architecture = header.text("general.architecture"), known(header)
    if architecture is None:
        return 1.0
    if architecture.embedding is Embedding.SQRT_WIDTH:
        return single(math.sqrt(header.count(f"{name}.embedding_length")))
    if architecture.embedding is Embedding.KEY:
        return single(header.number(f"{name}.embedding_scale", architecture.default_embedding_scale)) or 1.0
    return 1.0


def sliding_layers(header: Header) -> tuple[bool, ...]:
    """For each layer whether it attends to a sliding window only, as llama.cpp's ``load_swa_pattern`` decides it.

    Raises ``ModelError`` for a pattern that does not fit the model.
    """
    name = header.text("general.architecture")
    architecture, layers = known(header), layer_count(header)
    assert architecture is not None
    size_key, pattern_key = f"{name}.attention.sliding_window", f"{name}.attention.sliding_window_pattern"
    if architecture.sliding in (Sliding.ALWAYS, Sliding.NEEDED) and header.count(size_key) == 0:
        raise ModelError(f"{header.path}: metadata key '{size_key}' is 0; the file is not a complete model")
    if architecture.sliding in (Sliding.NEVER, Sliding.FIXED) or header.count(size_key, 0) == 0:
        return (False,) * layers
    pattern = header.values.get(pattern_key)
    if pattern is not None and pattern.is_array:
        if len(pattern) != block_count(header) or pattern.item_type in (GGUFValueType.STRING, GGUFValueType.FLOAT32):
            raise _refusal(header, f"key '{pattern_key}'", f"one flag for each of {layers} layers is expected")
        slides = tuple(bool(flag) for flag in pattern.items()[:layers])
    else:
        period = header.count(pattern_key, architecture.sliding_period)
        full = 0 if architecture.slides_last else period - 1
        slides = tuple(period == 0 or layer % period != full for layer in range(layers))
    if not any(slides):
        raise _refusal(header, f"key '{pattern_key}'", "no layer slides although the model has a sliding window")
    return slides


def window_values(header: Header, first: int, last: int, *, vocabulary: int) -> dict[str, Value]:
    """The metadata of the window that holds the layers ``first`` to ``last - 1``, without ``split.*``.

    ``vocabulary`` is the number of rows of the window's ``token_embd.weight`` (1 for the placeholder). The model must be
    ``cuttable``. Raises ``ModelError`` for the few cuts that are not exact, naming the layers.
    """
    name = header.text("general.architecture")
    architecture, layers = known(header), layer_count(header)
    assert architecture is not None
    assert 0 <= first < last <= layers
    _check_first(header, first)
    _check_count(header, architecture, last - first)
    prefix = f"{name}."
    values = _values_of_layers(header, architecture, first, last)
    values[f"{prefix}block_count"] = _uint32(last - first)
    values[f"{prefix}vocab_size"] = _uint32(vocabulary)
    values.pop(f"{prefix}nextn_predict_layers", None)
    if architecture.shares_cells and last < layers:
        values[f"{prefix}{architecture.shares_cells}"] = _uint32(0)
    values["tokenizer.ggml.model"] = scalar_value(GGUFValueType.STRING, "none")
    if f"{prefix}leading_dense_block_count" in values:
        dense = header.count(f"{prefix}leading_dense_block_count")
        values[f"{prefix}leading_dense_block_count"] = _uint32(min(max(dense - first, 0), last - first))
    if architecture.embedding is Embedding.KEY and not architecture.is_fed:
        values[f"{prefix}embedding_scale"] = _float32(0.0)
    if architecture.sliding not in (Sliding.NEVER, Sliding.FIXED):
        values.update(_sliding_values(header, architecture, first, last))
    if name == "deci":
        values = {**_head_values(header), **values}
    if name == "glm-dsa":
        types = array_value(GGUFValueType.UINT32, [int(each) for each in indexed_layers(header)[first:last]])
        values[f"{prefix}{_INDEXERS}"] = types
    if architecture.adds_positions:
        values[f"{prefix}context_length"] = _uint32(1)
    if header.derived is None:
        values.update(_derived_values(header, name, layers))
    if architecture.entries:
        names = {
            ENTRY_KEY: architecture.entries[0 if first == 0 else -1],
            EXIT_KEY: architecture.exit,
            LAST_EXIT_KEY: architecture.last_exit,
        }
        values.update({key: scalar_value(GGUFValueType.STRING, text) for key, text in names.items()})
    return values


def _check_first(header: Header, first: int) -> None:
    """Raises ``ModelError`` where no window begins at layer ``first``."""
    layers, places = layer_count(header), borders(header)
    if first > layers - tail_layers(header):
        raise ModelError(
            f"{header.path}: the last window has at least {tail_layers(header)} of {layers} layers, so none begins at layer "
            f"{first}; choose other windows"
        )
    if first and first not in places:
        name = header.text("general.architecture")
        more = f" and {places.start} more" if places.start < places.step else ""
        raise ModelError(
            f"{header.path}: a window of '{name}' has to begin at a multiple of {places.step} layers{more}, "
            f"not at layer {first}; choose other windows"
        )


def _values_of_layers(header: Header, architecture: Architecture, first: int, last: int) -> dict[str, Value]:
    """The model's own metadata that its windows keep; of what it says for each layer, that of theirs."""
    prefix, values = f"{header.text('general.architecture')}.", dict[str, Value]()
    for key, value in header.values.items():
        if key in _KEPT_GENERAL:
            values[key] = value
        elif key.startswith(prefix) or key in architecture.by_layer:
            short = key.removeprefix(prefix)
            slides = short.startswith(_SLIDING)
            if short in architecture.drops or (slides and architecture.sliding is not Sliding.FIXED):
                continue
            is_by_layer = value.is_array and (slides or short in _PER_LAYER or short in architecture.by_layer)
            values[key] = array_value(value.item_type, value.items()[first:last]) if is_by_layer else value
    return values


def _sliding_values(header: Header, architecture: Architecture, first: int, last: int) -> dict[str, Value]:
    prefix = f"{architecture.name}."
    slides = sliding_layers(header)[first:last]
    if any(slides):
        return {
            f"{prefix}attention.sliding_window": header.values[f"{prefix}attention.sliding_window"],
            f"{prefix}attention.sliding_window_pattern": array_value(GGUFValueType.BOOL, list(slides)),
        }
    if architecture.sliding in (Sliding.OPTIONAL, Sliding.NEEDED_IF_ANY):
        return {}
    values = {
        f"{prefix}attention.sliding_window": _uint32(_ENDLESS_WINDOW),
        f"{prefix}attention.sliding_window_pattern": array_value(GGUFValueType.BOOL, [True] * (last - first)),
    }
    if architecture.name != "cohere2":
        values[f"{prefix}rope.freq_base_swa"] = _float32(header.number(f"{prefix}rope.freq_base", 10_000.0))
    else:
        values[f"{prefix}rope.scaling.type"] = scalar_value(GGUFValueType.STRING, "linear")
        values[f"{prefix}rope.scaling.factor"] = _float32(float("inf"))
    return values


def _head_values(header: Header) -> dict[str, Value]:
    """Of DeciLM: what llama.cpp would derive from the heads of a window's first layer, which may have none."""
    width, heads = header.count("deci.embedding_length"), header.values["deci.attention.head_count"]
    items = heads.items() if heads.is_array else [heads.scalar()]
    each = width // next((item for item in items if isinstance(item, int) and item > 0), 1)
    rotated = header.count("deci.attention.key_length", each)
    found = {"attention.key_length": each, "attention.value_length": each, "rope.dimension_count": rotated}
    return {f"deci.{key}": _uint32(count) for key, count in found.items()}


def _derived_values(header: Header, name: str, layers: int) -> dict[str, Value]:
    """Values llama.cpp would derive from the number of layers or the vocabulary, written out for the whole model."""
    values: dict[str, Value] = {}
    if name == "minicpm" and "minicpm.residual_scale" not in header.values:
        values["minicpm.residual_scale"] = _float32(single(1.4) / single(math.sqrt(layers)))
    if name in _DEEPSEEK2:
        if _deepseek2_lite(header, layers):
            values[f"{name}.attention.q_lora_rank"] = _uint32(0)
        if header.count(f"{name}.expert_gating_func", 0) == 0:
            sigmoid = layers in (47, 48) and _vocabulary(header) == 154_880
            values[f"{name}.expert_gating_func"] = _uint32(2 if sigmoid else 1)
    return values


def _check_count(header: Header, architecture: Architecture, count: int) -> None:
    """Refuse a whole model, or a window, of ``count`` layers for which llama.cpp takes another graph."""
    name, layers = architecture.name, layer_count(header)
    if header.derived is not None:
        return  # it was tried with every number of layers
    if name == "gemma3" and 62 in (count, layers):
        width, heads = header.count("gemma3.embedding_length"), header.count("gemma3.attention.head_count")
        head = header.count("gemma3.attention.key_length", width // max(heads, 1))
        if width // max(heads, 1) != head:
            raise _refusal(header, "gemma3 with 62 layers", "llama.cpp takes its attention scale from that number")
    if name == "exaone4" and 64 in (count, layers):
        raise _refusal(header, "exaone4 with 64 layers", "llama.cpp makes layers slide at that number only")
    if name == "command-r" and layers >= 64:
        raise _refusal(header, "command-r with 64 layers", "llama.cpp expects norms from that number on only")
    if name == "gemma2" and 46 in (count, layers):
        raise _refusal(header, "gemma2 with 46 layers", "llama.cpp takes its attention scale from that number")
    if name in _DEEPSEEK2 and not _deepseek2_lite(header, layers) and _deepseek2_lite(header, count):
        raise ModelError(
            f"{header.path}: llama.cpp takes {count} layers of '{name}' for the lite model; choose other windows"
        )


def _check_inputs(header: Header, layers: int) -> None:
    each = layer_inputs(header)
    if not each:
        return
    width = header.count(f"{header.text('general.architecture')}.embedding_length")
    tokens = header.tensors.get("token_embd.weight")
    vocabulary = tokens.shape[-1] if tokens is not None else 0
    shapes = {LAYER_INPUTS: (each * layers, vocabulary), LAYER_PROJECTION: (width, each * layers)}
    for tensor, shape in shapes.items():
        if tensor not in header.tensors or header.tensors[tensor].shape != shape:
            raise ModelError(
                f"{header.path}: tensor '{tensor}' has not {each} values for each of {layers} layers; the file is not a "
                "complete model"
            )


def _deepseek2_lite(header: Header, layers: int) -> bool:
    """Whether llama.cpp takes that many layers for DeepSeek V2 Lite or a like model, whose queries are one matrix."""
    return layers in (26, 27) or (layers == 48 and _vocabulary(header) == 128_256)


def turns_by_context(header: Header) -> bool:
    """Whether angles of positions follow from how large the context is: llama.cpp has two sets of factors for them."""
    return "rope_factors_long.weight" in header.tensors


def counts_vocabulary(header: Header) -> bool:
    """Whether llama.cpp tells the model from others by the size of its vocabulary."""
    return header.text("general.architecture") in _DEEPSEEK2 and _vocabulary(header) in (128_256, 154_880)


def _vocabulary(header: Header) -> int:
    tokens = header.values.get("tokenizer.ggml.tokens")
    name = header.text("general.architecture")
    return header.count(f"{name}.vocab_size", len(tokens) if tokens is not None and tokens.is_array else 0)


def _check_arrays(header: Header, architecture: Architecture) -> None:
    name, layers = architecture.name, block_count(header)
    for key, value in header.values.items():
        if not value.is_array or not (key.startswith(f"{name}.") or key in architecture.by_layer):
            continue
        short = key.removeprefix(f"{name}.")
        is_text = value.item_type == GGUFValueType.STRING
        if short in architecture.by_layer:
            of_all = (layers, layer_count(header)) if short == _INDEXERS else (layers,)
            if len(value) not in of_all or is_text:
                raise _refusal(header, f"key '{key}'", f"one value for each of {layers} layers is expected")
            if architecture.skips_attention and short == "feed_forward_length" and 0 in value.items():
                raise _refusal(
                    header, f"key '{key}'", "a layer without a feed-forward network is left out of the graph"
                )
        elif short in _PER_LAYER:
            if len(value) != layers or is_text or len(set(value.items())) != 1:
                raise _refusal(header, f"key '{key}'", f"the same value for each of {layers} layers is expected")
        elif short != "attention.sliding_window_pattern" and len(value) == layers:
            raise _refusal(header, f"key '{key}'", "it has one value a layer and its use is not known")


def _is_set(header: Header, key: str) -> bool:
    value = header.values.get(key)
    if value is None:
        return False
    return any(value.items()) if value.is_array else bool(value.scalar())


def _refusal(header: Header, subject: str, reason: str) -> ModelError:
    return NotCutError(f"{header.path}: {subject} cannot be cut into windows exactly: {reason}", ADVICE)


def _uint32(number: int) -> Value:
    return scalar_value(GGUFValueType.UINT32, number)


def _float32(number: float) -> Value:
    return scalar_value(GGUFValueType.FLOAT32, number)
