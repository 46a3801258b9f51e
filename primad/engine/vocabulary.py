"""The tokenizer of a model file."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

from primad.engine.binding import llama, why
from primad.engine.marker_cuts import PIECE_CHARS, pieces
from primad.errors import EngineError

KEPT_PIECES: Final = 4096
"""Number of tokens whose bytes are cached, enough for most of a text: asking llama.cpp takes a tenth of the head's
processor time for a token."""

PIECE_BYTES: Final = 64
"""Room for the bytes of nearly every token."""


class LlamaVocabulary:
    """The tokenizer of a model file, loaded without its weights, or of a loaded llama.cpp ``model``."""

    def __init__(self, path: Path, model: Any = None) -> None:
        params = llama.llama_model_default_params()
        params.vocab_only = True
        self._model = model or llama.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise EngineError(f"llama.cpp cannot read the vocabulary of {path}: {why('it does not say why')}")
        self._vocab = llama.llama_model_get_vocab(self._model)
        self._longest_name: int | None = None
        self._piece = lru_cache(KEPT_PIECES)(self._read_piece)
        self.size = int(llama.llama_vocab_n_tokens(self._vocab))
        self.bos = self._special(llama.llama_vocab_bos(self._vocab))
        self.eos = self._special(llama.llama_vocab_eos(self._vocab))

    @property
    def handle(self) -> Any:
        """llama.cpp's handle, for its samplers; valid until ``release``."""
        return self._vocab

    def _special(self, token: int) -> str:
        return self.name(token) if 0 <= token < self.size else ""

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a generation."""
        return frozenset(token for token in range(self.size) if llama.llama_vocab_is_eog(self._vocab, token))

    @cached_property
    def longest_chars(self) -> int | None:
        """The most characters that a token covers; None where the tokenizer may drop characters."""
        if llama.llama_vocab_type(self._vocab) not in (llama.LLAMA_VOCAB_TYPE_BPE, llama.LLAMA_VOCAB_TYPE_SPM):
            return None
        if not self._tokenize("  ", False, False):  # blanks are dropped
            return None
        if self._longest_name is not None:
            return self._longest_name
        texts = (llama.llama_vocab_get_text(self._vocab, token) for token in range(self.size))
        return max(len(text.decode("utf-8", errors="replace")) for text in texts)

    @property
    def fill_in_ids(self) -> tuple[int, int, int, int]:
        """The fill-in-the-middle tokens: before the prefix, before the suffix, before the middle, before a file; -1 for
        none."""
        named = (
            llama.llama_vocab_fim_pre,
            llama.llama_vocab_fim_suf,
            llama.llama_vocab_fim_mid,
            llama.llama_vocab_fim_sep,
        )
        before, after, middle, file = (int(each(self._vocab)) for each in named)
        return before, after, middle, file

    @property
    def adds_end(self) -> bool:
        """Whether the model expects a token at the end of a text."""
        return bool(llama.llama_vocab_get_add_eos(self._vocab) or llama.llama_vocab_get_add_sep(self._vocab))

    @cached_property
    def _cut_markers(self) -> list[str]:
        """The markers before which a text may be cut: none if the text before a marker is not tokenised
        independently."""
        kind = llama.llama_vocab_type(self._vocab)
        if kind not in (llama.LLAMA_VOCAB_TYPE_BPE, llama.LLAMA_VOCAB_TYPE_SPM) or self.adds_end:
            return []
        special = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_USER_DEFINED | llama.LLAMA_TOKEN_ATTR_UNKNOWN
        kinds = {token: llama.llama_vocab_get_attr(self._vocab, token) for token in range(self.size)}
        marks = {token: attributes for token, attributes in kinds.items() if attributes & special}
        if any(attributes & llama.LLAMA_TOKEN_ATTR_LSTRIP for attributes in marks.values()):
            return []
        return [text for token in marks if (text := self.name(token))]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return token ids of ``text``; ``add_special`` adds the model's start and end tokens, ``parse_special`` reads
        markers."""
        if not parse_special or len(text) <= 2 * PIECE_CHARS:
            return self._tokenize(text, add_special, parse_special)
        tokens: list[int] = []
        for number, piece in enumerate(pieces(text, self._cut_markers, PIECE_CHARS)):
            tokens += self._tokenize(piece, add_special and number == 0, True)
        return tokens

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode("utf-8", errors="replace")
        room = len(data) + 16
        for _ in range(2):
            tokens = (llama.llama_token * room)()
            count = llama.llama_tokenize(self._vocab, data, len(data), tokens, room, add_special, parse_special)
            if count >= 0:
                return tokens[:count]
            room = -count
        raise EngineError(f"llama.cpp cannot tokenise a text of {len(data)} bytes")

    def piece(self, token: int) -> bytes:
        """Return the bytes that ``token`` adds to a text; none for control tokens."""
        return self._piece(token, False)

    def piece_or_marker(self, token: int) -> bytes:
        """Return ``piece``, or for a control token its name, unless it ends a generation."""
        piece = self.piece(token)
        if piece or llama.llama_vocab_is_eog(self._vocab, token):
            return piece
        return self._piece(token, True)

    def name(self, token: int) -> str:
        """Return a printable name of any token, control tokens included."""
        return self._piece(token, True).decode("utf-8", errors="replace")

    def all_tokens(self) -> Iterator[tuple[bytes, bool, bool]]:
        """Yield for each token in order its name's bytes, whether it is a control token, and whether it ends a
        generation."""
        buffer, ends, longest = ctypes.create_string_buffer(PIECE_BYTES), self.ends, 0
        for token in range(self.size):
            piece = self._read_piece(token, False, buffer)
            name = piece or self._read_piece(token, True, buffer)
            longest = max(longest, len(name))
            yield name, not piece, token in ends
        self._longest_name = longest

    def _read_piece(self, token: int, special: bool, buffer: ctypes.Array[ctypes.c_char] | None = None) -> bytes:
        room = PIECE_BYTES
        while True:
            if buffer is None:
                buffer = ctypes.create_string_buffer(room)
            count = llama.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room, buffer = -count, None

    def release(self) -> None:
        """Free its memory; it must not be used again."""
        llama.llama_model_free(self._model)
        del self._model, self._vocab
