"""Decides what each step computes: which tokens of which prompt, which generations' next tokens, which KV cache to
drop.

``schedule -> the ring computes -> commit``. The scheduler does not see the ring: it hands out ``PlannedStep`` steps in
order (the step log) and takes back the tokens sampled for each. Time is passed in.

Each generation has a KV sequence of its own. A step computes a chunk of one prompt, or the next tokens of generations
that are computed together (``grouping.py``). At most ``at_once`` generations run. Among those that wait, the owner with
the fewest running ones is next, or else the owner whose latest step is the oldest; within an owner, generations in
progress come first, then the lowest priority value, then the first to arrive. Among those that run, the owner that
waited longest for a step is next, and the generation of that owner that waited longest. So the devices of a ring work
for different owners, neither a long prompt nor a long completion blocks the others, and an owner with more requests
gets no larger share.

An owner that waits while others hold all sequences gets one by preemption: the newest generation of the owner that has
several, or, where each owner has one, the generation that has had its sequence longest, once it has sampled as many
tokens as it costs to resume. A preempted generation waits, and resumes later as after the end of an epoch.

Prompts are computed in chunks or pieces of them (``chunks.py``). Chunks follow each other into the ring without waiting
(up to ``depth`` in flight, in a ring one more while no generation decodes), since only the last one's output is needed;
decode steps wait for the tokens before them. After each chunk the decoding generations have their turn, since a chunk
takes as long as one round of theirs. Tokens of a prompt that are in the KV cache are not computed again (``slots.py``).
Generations with the same whole prompt, such as the choices of one request, sample their first tokens from the same
logits.

A generation that an earlier epoch began arrives with the tokens it has sampled. They are replayed one by one, as they
were computed then: llama.cpp sums several rows of a sequence in another order than single rows, and the last bits would
differ. Where the order is known to be the same, a step has several (``Batching.replays``), and where a difference is
allowed, a whole chunk (``Generate.replays_rows``). Like chunks they do not wait for each other. KV blocks that every
device has kept (``keeping.py``) are not recomputed.

A place in the ring for which no row is ready goes to draft tokens (``speculation/``): tokens that may come next are
computed in steps of their own after the last row of their generation, or in one step with it. If another token is
sampled, the KV cache of the draft is dropped with the next row of the generation, and steps for that draft alone are
discarded: nothing is sampled from them, and devices that have not computed them skip them.

A generation whose next token cannot be sampled yet, because its grammar's mask is late, is held back: it has no row
until then, and the others continue without it. Its drafts are dropped.
"""
