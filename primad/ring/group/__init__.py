"""The exchange of a tensor-parallel group: sums of what its ranks computed, in the middle of a step."""
