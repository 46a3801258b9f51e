"""What the cutter must know about one architecture. A header may bring an entry of its own."""

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
    ALL = "every one, beside its cells"
    TENSORS = "those with tensors of a state"
    ONLY = "every one, and none has cells"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the cutter must know about one ``general.architecture``."""

    name: str
    tied_output_fallback: bool = True
    """Without ``output.weight`` llama.cpp takes ``token_embd.weight`` as the output matrix."""
    embedding: Embedding = Embedding.PLAIN
    default_embedding_scale: float = 0.0
    """Value llama.cpp takes where the key ``embedding_scale`` is missing; 0 means that nothing is scaled."""
    scales_tokens_alone: bool = False
    """A picture's rows, which are no tokens, are not multiplied."""
    sliding: Sliding = Sliding.NEVER
    sliding_period: int = 0
    """llama.cpp's default pattern: in each ``sliding_period`` layers the last one does not slide."""
    slides_last: bool = False
    """It is the first one that does not."""
    cut_multiple: int = 1
    """The first layer of every window has to be a multiple of this, and of the key ``step``."""
    step: str = ""
    needs: str = ""
    """A key of flags by layer; every window needs a layer with the flag set, since llama.cpp aborts over unused inputs.
    """
    skips_attention: bool = False
    """Layers without KV heads have no attention; every window has to have one that has it, for the same reason."""
    needs_indexer: bool = False
    """Every window has to have a layer that chooses what attention sees, for the same reason."""
    takes_over: bool = False
    """Windows begin at such a layer: the layers after it may use the positions that it chose."""
    max_sequences: int = 0
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
    state: StateKind | None = None
    """How its layers compute theirs, where devices compare several rows of that."""
    takes_back: bool = False
    """The last rows of a step can be taken back from its layers' states."""
    output_norm: str = "output_norm"
    exit: str = "l_out-{layer}"
    """The graph's name for a layer's output, with the ``layer`` or the one ``after`` it."""
    last_exit: str = ""
    """The graph's name for the last layer's output, if different."""
    adds_positions: bool = False
    """The head adds a row of ``position_embd.weight`` to each row of the embedding; in windows this is 0."""
    predicts: bool = False
    """Its last layers may be for multi-token prediction, which the graph leaves out."""
    drafts: bool = False
    """One of them drafts, with a graph of its own, which takes no other cut than the tail's."""
    layer_inputs: str = ""
    """The key for the number of values that each layer takes in addition to the hidden state: from rows of
    ``per_layer_token_embd.weight`` and from the tokens' embedding by ``per_layer_model_proj.weight``."""
    shares_cells: str = ""
    """The key of how many layers, the last ones, use the KV cells of the two before them."""
    shares_where_full: bool = False
    """The tensors that every window shares are used only by layers that do not slide."""
    entries: tuple[str, ...] = ()
    """The graph's names for the token rows, and for the hidden state made of them. If there are any, the route's first
    window is fed at the first one and the others at the last; empty: at those that the engine knows."""

    def exit_of(self, layer: int, *, is_last: bool) -> str:
        """The graph's name for the output of ``layer``, counted from the window's first."""
        name = (is_last and self.last_exit) or self.exit
        return name.replace("{layer}", str(layer)).replace("{after}", str(layer + 1))
