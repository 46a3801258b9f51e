"""The exchange of a tensor-parallel group: sums over its ranks' results, in the middle of a step."""
