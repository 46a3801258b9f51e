"""Decides what each step computes: which tokens of which prompt, which generations' next tokens, which KV cache to
drop.

``schedule -> the ring computes -> commit``. The scheduler does not see the ring: it hands out ``PlannedStep`` steps in
order (the step log) and takes back the tokens sampled for each. Time is passed in.

Each generation has a KV sequence of its own. A step computes a chunk of one prompt, or the next tokens of generations
that are computed together (``ring/grouping.py``). An *owner* is an API key, or without keys a client's address. At most
``at_once`` generations run; an owner without one may start one more, up to ``sequences``. Among waiting owners the one
with the fewest running generations is next, in a tie the one that has gone longest without a step; within an owner,
generations in progress come first, then the lowest priority value, then the first to arrive (``admission.py``). Among
those that run, the owner that waited longest for a step is next, and the generation of that owner that waited longest.
So the devices of a ring work for different owners, neither a long prompt nor a long completion blocks the others, and
an owner with more requests gets no larger share.

An owner that waits while others hold all sequences gets one by preemption. If an owner has several, its newest
generation is preempted; otherwise the generation that has held its sequence longest, once it has sampled ``MIN_TURN``
tokens and as many as it costs to resume. A preempted generation waits, and resumes later as after the end of an epoch.

Prompts are computed in chunks or pieces of them (``ring/chunks.py``). Chunks follow each other into the ring without
waiting (up to ``depth`` in flight, in a ring one more while no generation decodes), since only the last one's output is
needed; decode steps wait for the tokens before them. After each chunk the decoding generations have their turn, since a
chunk takes about as long as one token of each. Tokens of a prompt that are in the KV cache are not computed again
(``ring/slots.py``). Generations with the same whole prompt, such as the choices of one request, sample their first
tokens from the same logits.

A generation that an earlier epoch began arrives with the tokens it has sampled. They are replayed one by one, as they
were computed then: llama.cpp sums several rows of a sequence in another order than single rows, and the last bits would
differ. Where the order is known to be the same, a step replays several (``Batching.replays``), and where a difference
is allowed, a whole chunk (``Generate.replays_rows``). Like chunks they do not wait for each other. KV blocks that every
device has kept (``ring/keeping.py``) are not recomputed.

When the ring has room for a step but no token is ready, it computes draft tokens (``ring/speculation/``): they are
computed in steps of their own after the last row of their generation, or in one step with it. If another token is
sampled, the next step of the generation first drops the KV cache of the draft, and steps for that draft alone are
discarded: nothing is sampled from them, and devices that have not computed them skip them.

A generation whose next token cannot be sampled yet, because its grammar's mask is late, is held back: it has no row
until then, and the others continue without it. Its drafts are dropped.
"""
