"""Trees of drafts: which of several tokens that may come next are computed in one step, and where each lies in the log.

As in LLMCad (Xu et al., 2023) a branch opens where another token is likely enough, and each next draft goes to the branch
that holds most likely with all before it. A step of n rows then holds those n - 1 drafts that make most tokens of it. One
path, that of the first draft at each place, lies behind the text in its own sequence, as a chain does. Every other one that
ends has a sequence out of a pool, a copy of the text before anything is written to it. So no draft ever takes the place of a
cell that another path, or the text, has.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from primad.ring.speculation.drafter import DraftToken

OPENS_AT: Final = 0.05
"""A branch opens where its first draft holds in such a share of cases, with all before it."""
PAYS: Final = 1.02
"""So many times the tokens of the best chain a tree must promise."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A draft behind node ``parent`` of its tree; -1: behind the text. A parent comes before its children."""

    draft_token: DraftToken
    parent: int


class ProposesTokens(Protocol):
    """Who drafts behind the text and what was drafted before."""

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        """What may follow ``drafts`` first of all."""

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        """What else may follow them."""


def best_tree(
    draft_tokens: ProposesTokens, costs: Sequence[float], branches: int, minimum: float, *, draft: float = 0.0
) -> list[TreeNode]:
    """The tree that makes most tokens in the time that a step of its rows takes, with at most so many ``branches``.

    A step of n rows takes ``costs[n - 1]``, and each ``draft`` so much of one of a single row before it. It makes more than
    ``minimum`` times the tokens of single rows, or is empty. One without branches is a chain, and so it is where a tree is
    hardly better.
    """
    took = [cost / costs[0] + rows * draft for rows, cost in enumerate(costs)]
    chain, chain_rate = _best(_grown(draft_tokens, took, 0), took)
    tree, tree_rate = _best(_grown(draft_tokens, took, branches), took) if branches else (chain, chain_rate)
    best, rate = (tree, tree_rate) if tree_rate > PAYS * chain_rate else (chain, chain_rate)
    return best if rate > minimum else []


def _grown(draft_tokens: ProposesTokens, took: Sequence[float], branches: int) -> list[tuple[TreeNode, float]]:
    """Nodes in the order in which they hold most likely, each with how likely that is: as far as one more may pay if it is
    as sure as its parent, since a draft takes time to find.
    """
    grown: list[tuple[TreeNode, float]] = []
    frontier: list[tuple[float, int, DraftToken, int, bool, tuple[int, ...]]] = []
    parents: set[int] = set()
    left, number, expected = branches, 0, 1.0

    def open_behind(parent: int, share: float, drafts: tuple[int, ...]) -> None:
        nonlocal number
        first = draft_tokens.propose(drafts)
        seconds = draft_tokens.others(drafts) if branches else ()
        found = [(first, False)] if first is not None else []
        found += [(each, True) for each in seconds if first is None or each.token != first.token]
        for draft_token, is_other in found:
            if not is_other or share * draft_token.sure >= OPENS_AT:
                number += 1
                heapq.heappush(frontier, (-share * draft_token.sure, number, draft_token, parent, is_other, drafts))

    open_behind(-1, 1.0, ())
    while frontier and len(grown) < len(took) - 1:
        minus_share, _, draft_token, parent, _, drafts = heapq.heappop(frontier)
        if parent in parents:
            if not left:
                continue
            left -= 1
        parents.add(parent)
        grown.append((TreeNode(draft_token, parent), -minus_share))
        expected -= minus_share
        if _pays_more(took[len(grown) :], expected, -minus_share, draft_token.sure):
            open_behind(len(grown) - 1, -minus_share, (*drafts, draft_token.token))
    return grown


def _pays_more(took: Sequence[float], expected: float, share: float, sure: float) -> bool:
    """Whether a step gives more with further rows behind one that holds in the ``share`` of cases, each ``sure`` behind the
    one before it, than the ``expected`` tokens in the first of the times that it ``took``."""
    now = expected / took[0]
    for more in took[1:]:
        share *= sure
        expected += share
        if expected / more > now:
            return True
    return False


def _best(grown: Sequence[tuple[TreeNode, float]], took: Sequence[float]) -> tuple[list[TreeNode], float]:
    best, rate, expected = 0, 1.0, 1.0
    for count, (_, share) in enumerate(grown, 1):
        expected += share
        if expected / took[count] > rate:
            best, rate = count, expected / took[count]
    return [node for node, _ in grown[:best]], rate


def child(nodes: Sequence[TreeNode], parent: int, token: int) -> int | None:
    """The node behind ``parent`` that is ``token``."""
    return next((i for i, node in enumerate(nodes) if node.parent == parent and node.draft_token.token == token), None)


def at_path(nodes: Sequence[TreeNode], tokens: Sequence[int]) -> int | None:
    """The node that ``tokens`` lead to from the text; None where one of them was not drafted."""
    at: int | None = -1
    for token in tokens:
        at = None if at is None else child(nodes, at, token)
    return at


def behind(nodes: Sequence[TreeNode], parent: int) -> list[DraftToken]:
    """What may follow ``parent``, the likeliest first."""
    return [node.draft_token for node in nodes if node.parent == parent]


def below(nodes: Sequence[TreeNode], root: int) -> list[TreeNode]:
    """The tree behind ``root``, as it is when that is the text."""
    places = {root: -1}
    found: list[TreeNode] = []
    for place, node in enumerate(nodes):
        if node.parent in places:
            places[place] = len(found)
            found.append(TreeNode(node.draft_token, places[node.parent]))
    return found


def first_path(nodes: Sequence[TreeNode]) -> list[int]:
    """The first draft behind the text, the first behind that, and so on."""
    found: list[int] = []
    at: int | None = -1
    while (at := next((i for i, node in enumerate(nodes) if node.parent == at), None)) is not None:
        found.append(at)
    return found


def depth(nodes: Sequence[TreeNode], node: int) -> int:
    """How many tokens behind the text ``node`` is; 1 for the first."""
    count = 0
    while node >= 0:
        node, count = nodes[node].parent, count + 1
    return count


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Where the rows of a tree lie: those of ``main`` in the text's own sequence, and each path that ends elsewhere in one
    of the ``ends``: the sequence of the pool and the node at its end.
    """

    nodes: tuple[TreeNode, ...]
    main: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]

    def sequences(self, node: int, own: int) -> list[int]:
        """The sequences that have the row of ``node``, or that of the text's last token (-1); ``own`` is the text's."""
        found = [own] if node < 0 or node in self.main else []
        return found + [number for number, end in self.ends if node < 0 or node in self._path(end)]

    def holder(self, node: int) -> int | None:
        """A sequence of the pool that has ``node``; None where the text's own has it."""
        if node < 0 or node in self.main:
            return None
        return next(number for number, end in self.ends if node in self._path(end))

    def _path(self, node: int) -> list[int]:
        found = []
        while node >= 0:
            found.append(node)
            node = self.nodes[node].parent
        return found


NO_TREE: Final = TreeRows((), (), ())


def chain_of(draft_tokens: Sequence[DraftToken]) -> TreeRows:
    """``draft_tokens`` one behind the other."""
    return placed([TreeNode(draft_token, place - 1) for place, draft_token in enumerate(draft_tokens)], ())


def placed(nodes: Sequence[TreeNode], pool: Sequence[int]) -> TreeRows:
    """``nodes`` in sequences, those of the ``pool`` for all paths but the main one. It has enough of them."""
    main = first_path(nodes)
    parents = {node.parent for node in nodes}
    leaves = [i for i in range(len(nodes)) if i not in parents and i not in main]
    return TreeRows(tuple(nodes), tuple(main), tuple(zip(pool, leaves, strict=False)))
