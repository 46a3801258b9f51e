"""Cut a LoRA adapter for a rank of a tensor-parallel group, like the matrices that it changes (``shares.py``).

An adapter adds ``b @ a`` to a matrix. If the matrix is cut by rows, a rank has all of ``a`` and its rows of ``b``; if
by columns, its columns of ``a`` and all of ``b``: the product is a part of the same sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from primad.gguf.adapter import OUTPUT, A, Adapter, B
from primad.gguf.architectures.table import ADVICE, NotCutError
from primad.gguf.architectures.tensors import layer_of
from primad.gguf.constants import GGML_QUANT_SIZES, GGUFValueType
from primad.gguf.header import TensorInfo, scalar_value
from primad.gguf.share_rules import LayerShare, ShareRules
from primad.gguf.shares import shared_ranks, vocabulary_share
from primad.gguf.slices import sliced


def adapted_ranks(rules: ShareRules, limit: int, adapters: Sequence[Adapter]) -> int:
    """How many of ``limit`` devices can share each layer with ``adapters``. Raises ``NotCutError`` for fewer than two."""
    for each in adapters:
        share_adapter(each, rules, [1, 1], 0)
    return shared_ranks(rules, limit)


def share_adapter(adapter: Adapter, rules: ShareRules, weights: Sequence[int], rank: int) -> Adapter:
    """``adapter`` of the model of ``rules`` for ``rank`` of a group whose ranks have shares in proportion to ``weights``.

    Raises ``NotCutError`` if the adapter cannot be shared in this way.
    """
    layers, found = adapter.layer_count, dict[str, TensorInfo]()
    shares = [rules.shares(layer, weights)[rank] for layer in range(layers)]
    for name, a in adapter.header.tensors.items():
        if not name.endswith(A):
            continue
        stem, layer = name.removesuffix(A), layer_of(name)
        b = adapter.header.tensors[stem + B]
        if layer is not None and layer < layers:
            for changed, own_a, own_b in _of_layer(rules, layer, shares[layer], stem, a, b, is_first=rank == 0):
                found[changed + A], found[changed + B] = own_a, own_b
        elif stem == OUTPUT:
            own = sliced(b, 1, [vocabulary_share(b.shape[1], weights, rank)])
            found[stem + A], found[stem + B] = a, own
    named = {name: replace(tensor, name=name) for name, tensor in found.items()}
    graph = scalar_value(GGUFValueType.STRING, rules.graph)
    values = {**adapter.header.values, "general.architecture": graph}
    return replace(adapter, header=replace(adapter.header, tensors=named, values=values))


def _of_layer(
    rules: ShareRules,
    layer: int,
    share: LayerShare,
    stem: str,
    a: TensorInfo,
    b: TensorInfo,
    *,
    is_first: bool,
) -> Iterator[tuple[str, TensorInfo, TensorInfo]]:
    """A rank's part of ``a`` and ``b``, by the name of the matrix that they change."""
    base = rules.header.tensors[stem]
    if rules.cuts_columns(layer, base):
        if GGML_QUANT_SIZES[base.type][0] % GGML_QUANT_SIZES[a.type][0]:
            raise NotCutError(
                f"{a.path}: its matrix for '{stem}' cannot be shared between devices: its blocks are larger than those of "
                "the model; convert it to float16",
                ADVICE,
            )
        yield stem, rules.part(layer, replace(a, name=stem), share, is_first=is_first), b
        return
    for own in rules.parted(replace(b, name=stem)):
        yield own.name, a, rules.part(layer, own, share, is_first=True)
