"""What the cutter must know about one architecture. A header may have its own entry (``Header.derived``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from halda import StateKind


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
    """Which layers keep a recurrent state instead of a KV cache by position."""

    NEVER = "none"
    INTERVAL = "all but each full_attention_interval-th, or as attention.recurrent_layers says"
    HEADS = "those without KV heads"
    ALL = "every one, in addition to its cells"
    TENSORS = "those with tensors of a state"
    ONLY = "every one, and none has cells"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the cutter must know about one ``general.architecture``."""

    name: str
    tied_output_fallback: bool = True
    """Without ``output.weight``, llama.cpp uses ``token_embd.weight`` as the output matrix."""
    embedding: Embedding = Embedding.PLAIN
    default_embedding_scale: float = 0.0
    """llama.cpp's value if the key ``embedding_scale`` is missing; 0 means no scaling."""
    scales_tokens_alone: bool = False
    """Only rows of tokens are multiplied, not those of a picture."""
    sliding: Sliding = Sliding.NEVER
    sliding_period: int = 0
    """llama.cpp's default pattern: of every ``sliding_period`` layers, the last one does not slide."""
    slides_last: bool = False
    """The first layer of each period does not slide, instead of the last."""
    cut_multiple: int = 1
    """The first layer of every window has to be a multiple of this, and of the key ``step``."""
    step: str = ""
    needs: str = ""
    """A key of flags by layer; every window needs a layer with the flag set, since llama.cpp aborts over unused inputs.
    """
    skips_attention: bool = False
    """Layers without KV heads have no attention; every window needs a layer with attention, for the same reason."""
    needs_indexer: bool = False
    """Every window needs a layer that chooses the positions that attention sees, for the same reason."""
    takes_over: bool = False
    """Windows begin at such a layer: the layers after it may use the positions that it chose."""
    max_sequences: int = 0
    """Maximum number of concurrent sequences; 0: llama.cpp's limit. llama.cpp aborts if the graph has too many nodes."""
    is_fed: bool = False
    """The graph has no input for hidden states; they replace the looked-up token rows."""
    knows: frozenset[str] = frozenset()
    """Keys that this entry handles, though they prevent cutting other architectures."""
    refuses: tuple[tuple[str, str], ...] = ()
    """Keys that prevent cutting this architecture only, and why."""
    by_layer: frozenset[str] = frozenset()
    """Keys with one value per layer, which may differ."""
    drops: frozenset[str] = frozenset()
    """Keys that are left out of windows."""
    recurrent: Recurrent = Recurrent.NEVER
    state: StateKind | None = None
    """How its layers compute their state, for devices that compare several rows of that computation."""
    takes_back: bool = False
    """The last tokens of a step can be removed from its layers' states."""
    output_norm: str = "output_norm"
    exit: str = "l_out-{layer}"
    """The graph's name for a layer's output, with the ``layer`` or the one ``after`` it."""
    last_exit: str = ""
    """The graph's name for the last layer's output, if different."""
    adds_positions: bool = False
    """The head adds a row of ``position_embd.weight`` to each token's embedding; in windows the matrix is 0."""
    predicts: bool = False
    """Its last layers may be for multi-token prediction; the graph leaves those out."""
    drafts: bool = False
    """One of those layers can draft, with a separate graph that only the tail's cut fits."""
    layer_inputs: str = ""
    """The key for the number of values that each layer takes in addition to the hidden state: from rows of
    ``per_layer_token_embd.weight`` and from the tokens' embedding by ``per_layer_model_proj.weight``."""
    shares_cells: str = ""
    """The key for the number of last layers that use the KV cells of the two layers before them."""
    shares_where_full: bool = False
    """The tensors that every window shares are used only by layers that do not slide."""
    entries: tuple[str, ...] = ()
    """The graph's names for the token rows and for the hidden state made from them. The route's first window takes its
    input at the first name, the other windows at the last; if empty, at the names that the engine knows."""

    def exit_of(self, layer: int, *, is_last: bool) -> str:
        """The graph's name for the output of ``layer``, counted from the window's first."""
        name = (is_last and self.last_exit) or self.exit
        return name.replace("{layer}", str(layer)).replace("{after}", str(layer + 1))
