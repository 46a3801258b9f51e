"""Shares of a model: the layers of a rank of a tensor-parallel group, as the header of a separate model.

A rank holds some heads of each layer (rows of the query, key and value matrices, columns of the output), some
feed-forward values (rows of gate and up, columns of down), and rows of the output matrix. Its columns applied to the
results of its rows give a part of a sum over the ranks (``engine/llama/sums.py``); everything else is whole on every
rank. Columns are cut between blocks of the quantisation. For a bias that is added to a sum the first rank has the
values and the others zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from halda import RankBytes
from primad.gguf.architectures.layers import count_at, layer_count
from primad.gguf.architectures.table import ADVICE, NotCutError
from primad.gguf.architectures.tensors import TensorRole, layer_of, tensor_roles
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header, Value, array_value, scalar_value
from primad.gguf.network_shares import LENGTHS
from primad.gguf.share_rules import LayerShare, ShareRules
from primad.gguf.slices import sliced
from primad.gguf.splits import MAX_RANKS, ranges_of
from primad.gguf.windows import token_embedding


def shared_ranks(rules: ShareRules, limit: int) -> int:
    """How many of ``limit`` devices can share each layer. Raises ``NotCutError`` where fewer than two can."""
    found = rules.max_ranks(limit)
    if found < 2:
        rules.shares(0, [1, 1])
        raise NotCutError(f"{rules.header.path}: has too few heads or values to be shared between devices", ADVICE)
    return found


def share_bytes(rules: ShareRules, weights: Sequence[int]) -> list[RankBytes]:
    """Each rank's bytes of the weights, as ``share_header`` cuts them. Raises ``NotCutError`` as that does."""
    return [_bytes_of(share_header(rules, weights, rank)) for rank in range(len(weights))]


def _bytes_of(own: Header) -> RankBytes:
    layers, output = [0] * layer_count(own), own.tensors.get("output.weight") or token_embedding(own)
    for name, tensor in own.tensors.items():
        layer = layer_of(name)
        if layer is not None and layer < len(layers):
            layers[layer] += tensor.bytes
    return RankBytes(layers=tuple(layers), output=output.bytes)


def share_header(rules: ShareRules, weights: Sequence[int], rank: int) -> Header:
    """The part of the model for ``rank`` of a group whose ranks have shares in proportion to ``weights``: a header of
    slices of the tensors, from which windows are cut as from any other (``ModelCutter``). The token embedding has the
    rows of the rank's part of the output matrix.

    Raises ``NotCutError`` if the model cannot be shared in this way.
    """
    assert 0 <= rank < len(weights) <= MAX_RANKS
    header, layers = rules.header, layer_count(rules.header)
    shares = [rules.shares(layer, weights)[rank] for layer in range(layers)]
    tensors, roles = {}, tensor_roles(header)
    for name, tensor in header.tensors.items():
        layer, role = layer_of(name), roles[name]
        if layer is not None and layer < layers:
            for own in rules.parted(tensor):
                part = rules.part(layer, own, shares[layer], is_first=rank == 0)
                tensors[own.name] = part
            continue
        if role in (TensorRole.EMBEDDING, TensorRole.OUTPUT, TensorRole.LAYER_INPUTS):
            tensor = sliced(tensor, len(tensor.shape) - 1, [vocabulary_share(tensor.shape[-1], weights, rank)])
        tensors[name] = tensor
    values = {**header.values, **_values_of(rules, shares)}
    name, graph = header.text("general.architecture"), rules.graph
    if graph != name:
        values = {
            f"{graph}.{key.removeprefix(f'{name}.')}" if key.startswith(f"{name}.") else key: value
            for key, value in values.items()
        }
        values["general.architecture"] = scalar_value(GGUFValueType.STRING, graph)
    return replace(header, tensors=tensors, values=values)


def vocabulary_share(vocabulary: int, weights: Sequence[int], rank: int) -> range:
    """The tokens whose logits ``rank`` computes. Raises ``ValueError`` for fewer tokens than ranks."""
    found = ranges_of(vocabulary, max(min(32, vocabulary // len(weights)), 1), weights)
    if found is None:
        raise ValueError(f"{vocabulary} tokens for {len(weights)} ranks")
    return found[rank]


def _values_of(rules: ShareRules, shares: Sequence[LayerShare]) -> dict[str, Value]:
    """The metadata with the numbers of heads and values of a rank's layers."""
    header, name = rules.header, rules.header.text("general.architecture")
    found: dict[str, list[int | None]] = {}
    if any(share.heads for share in shares):
        found["attention.head_count"] = [len(share.heads) or None for share in shares]
        found["attention.head_count_kv"] = [len(share.keys) or None for share in shares]
    for kind, key in LENGTHS.items():
        if any(kind in share.values for share in shares):
            found[key] = [len(share.values[kind]) if kind in share.values else None for share in shares]
    if not any("" in share.values for share in shares):  # some graphs use its length as the experts' length
        whole = [rules.columns(layer, "ffn_down_exps") for layer in range(len(shares))]
        key = f"{name}.{LENGTHS['']}"
        if all(each is not None and each.shape[0] == count_at(header, key, n, 0) for n, each in enumerate(whole)):
            found[LENGTHS[""]] = found[LENGTHS["_exps"]]
    values = {f"{name}.{key}": _counts(header, f"{name}.{key}", counts) for key, counts in found.items() if counts}
    for share in shares:
        for key, count in rules.state_counts(share).items():
            values[f"{name}.{key}"] = scalar_value(GGUFValueType.UINT32, count)
    width, heads = header.count(f"{name}.embedding_length"), 0 if rules.why_whole else rules.heads(0)[0]
    for key in ("attention.key_length", "attention.value_length"):
        if f"{name}.{key}" not in header.values and heads:
            values[f"{name}.{key}"] = scalar_value(GGUFValueType.UINT32, width // heads)
    return values


def _counts(header: Header, key: str, counts: Sequence[int | None]) -> Value:
    """``counts`` by layer in the form of the value at ``key``; None: unchanged."""
    old = header.values.get(key)
    if old is None or not old.is_array:
        return scalar_value(GGUFValueType.UINT32, next(count for count in counts if count is not None))
    items = old.items()
    own = [*counts, *[None] * (len(items) - len(counts))]
    return array_value(
        old.item_type, [item if count is None else count for item, count in zip(items, own, strict=True)]
    )
