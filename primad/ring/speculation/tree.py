"""Trees of drafts: which alternative tokens are computed in one step, and where each lies in the log.

As in LLMCad (Xu et al., 2023) a branch opens where another token is likely enough, and each next draft goes to the
branch most likely accepted together with all before it. A step of n rows then has the n - 1 drafts that yield most
tokens. One path, the first draft at each place, follows the text in the text's sequence, as a chain does. Every other
path has a sequence from a pool, a copy of the text's made before anything is written to it. So no draft ever overwrites
a cell of another path or of the text.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from primad.ring.speculation.drafter import DraftToken

OPENS_AT: Final = 0.05
"""A branch opens if its first draft is accepted, with all before it, in at least this share of cases."""
PAYS: Final = 1.02
"""A tree must promise this many times the tokens of the best chain."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A draft after node ``parent`` of its tree; -1: after the text. A parent comes before its children."""

    draft_token: DraftToken
    parent: int


class ProposesTokens(Protocol):
    """Drafts after the text and earlier drafts."""

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        """Return the first choice to follow ``drafts``."""

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        """Return alternatives to it."""


def best_tree(
    draft_tokens: ProposesTokens, costs: Sequence[float], branches: int, minimum: float, *, draft: float = 0.0
) -> list[TreeNode]:
    """Return the tree with most tokens per time of its step, with at most ``branches`` branches.

    A step of n rows takes ``costs[n - 1]``, and each draft takes ``draft`` times a one-row step beforehand. The tree
    gives more than ``minimum`` times the tokens of single rows, or is empty. Without branches it is a chain, and also
    where a tree is hardly better.
    """
    took = [cost / costs[0] + rows * draft for rows, cost in enumerate(costs)]
    chain, chain_rate = _best(_grown(draft_tokens, took, 0), took)
    tree, tree_rate = _best(_grown(draft_tokens, took, branches), took) if branches else (chain, chain_rate)
    best, rate = (tree, tree_rate) if tree_rate > PAYS * chain_rate else (chain, chain_rate)
    return best if rate > minimum else []


def _grown(draft_tokens: ProposesTokens, took: Sequence[float], branches: int) -> list[tuple[TreeNode, float]]:
    """Nodes in order of falling acceptance, each with its probability: as far as one more may pay if it is as sure as
    its parent, since finding a draft takes time."""
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
    """Whether further rows after one with probability ``share``, each ``sure`` given the one before it, give more
    tokens per time than the ``expected`` tokens in the first of the times ``took``."""
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
    """The child of ``parent`` that is ``token``."""
    return next((i for i, node in enumerate(nodes) if node.parent == parent and node.draft_token.token == token), None)


def at_path(nodes: Sequence[TreeNode], tokens: Sequence[int]) -> int | None:
    """The node that ``tokens`` lead to from the text; None if one of them was not drafted."""
    at: int | None = -1
    for token in tokens:
        at = None if at is None else child(nodes, at, token)
    return at


def behind(nodes: Sequence[TreeNode], parent: int) -> list[DraftToken]:
    """The drafts that may follow ``parent``, the likeliest first."""
    return [node.draft_token for node in nodes if node.parent == parent]


def below(nodes: Sequence[TreeNode], root: int) -> list[TreeNode]:
    """The subtree below ``root``, with ``root`` as the new end of the text."""
    places = {root: -1}
    found: list[TreeNode] = []
    for place, node in enumerate(nodes):
        if node.parent in places:
            places[place] = len(found)
            found.append(TreeNode(node.draft_token, places[node.parent]))
    return found


def first_path(nodes: Sequence[TreeNode]) -> list[int]:
    """The first draft after the text, the first after that, and so on."""
    found: list[int] = []
    at: int | None = -1
    while (at := next((i for i, node in enumerate(nodes) if node.parent == at), None)) is not None:
        found.append(at)
    return found


def depth(nodes: Sequence[TreeNode], node: int) -> int:
    """How many tokens after the text ``node`` is; 1 for the first."""
    count = 0
    while node >= 0:
        node, count = nodes[node].parent, count + 1
    return count


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Where the rows of a tree lie: those of ``main`` in the text's own sequence, and each other path in one of the
    ``ends``: a sequence of the pool and the node at the path's end."""

    nodes: tuple[TreeNode, ...]
    main: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]

    def sequences(self, node: int, own: int) -> list[int]:
        """The sequences that have the row of ``node``, or of the text's last token (-1); ``own`` is the text's
        sequence."""
        found = [own] if node < 0 or node in self.main else []
        return found + [number for number, end in self.ends if node < 0 or node in self._path(end)]

    def holder(self, node: int) -> int | None:
        """A sequence of the pool that has ``node``; None if the text's own has it."""
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
    """``draft_tokens`` as a chain."""
    return placed([TreeNode(draft_token, place - 1) for place, draft_token in enumerate(draft_tokens)], ())


def placed(nodes: Sequence[TreeNode], pool: Sequence[int]) -> TreeRows:
    """Place ``nodes`` in sequences; paths other than the main one use the ``pool``, which has enough of them."""
    main = first_path(nodes)
    parents = {node.parent for node in nodes}
    leaves = [i for i in range(len(nodes)) if i not in parents and i not in main]
    return TreeRows(tuple(nodes), tuple(main), tuple(zip(pool, leaves, strict=False)))
