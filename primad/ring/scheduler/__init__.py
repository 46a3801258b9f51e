"""Decides what each step computes: whose prompt rows, whose next token, which KV cells are forgotten.

``schedule -> the ring computes -> commit``. The scheduler sees no ring: it hands out ``PlannedStep`` steps in order (the
step log) and takes back what was sampled for each. Time is passed in.

Each generation has a KV sequence of its own, and a step computes a chunk of one prompt, or the next tokens of generations
that are computed together (``grouping.py``). As many run ``at_once`` as may; of those that wait the owner who has the
fewest running is next, or had a step longest ago, and of theirs the first one of the lowest priority, behind what was begun
before. Of those that run it is the owner who waited longest for a step, and of theirs the one that did: so the devices of a
ring compute for different ones, neither a long prompt nor a long answer keeps the others from going on, and who asks for
more at once has no larger share.

An owner who waits while others have all sequences gets one: of whoever has several the newest generation is set back, and
where each has one the generation that had its sequence longest, once it has drawn as many tokens as it costs to come back.
What is set back waits and goes on later as after the end of an epoch.

Prompts are fed in chunks or pieces of them (``chunks.py``). They follow each other into the ring without waiting (up to
``depth`` in flight, in a ring one more while nobody writes), since only the last one's output is needed; decode steps wait
for the tokens before them. Behind each the others that write have their turn, for it takes as long as a round of theirs.
What of a prompt is there already is not computed again (``slots.py``); generations with the same whole prompt, as the
choices of one request, have their first tokens drawn from the same logits.

A generation that an earlier epoch began comes with the tokens it has sampled already. They are fed one by one, as they were
fed then: llama.cpp computes several rows of a sequence in another order than single rows, and its sums would differ in the
last bits. Where it is known that they do not, a step has some (``Batching.replays``), and where they may, a whole chunk
(``Generate.replays_rows``). Like chunks they do not wait for each other. What of a generation is kept on every device
(``keeping.py``) is not computed again at all.

Where nobody has a row for it a place of the ring is given to a draft (``drafting/``): a token that may come next is computed
in a step of its own behind its generation's last row, or some with that row in one step. If another token is drawn before
it, its cells are forgotten with the generation's next row, and the steps that are for it alone are discarded: nothing
is drawn from them, and devices that have not computed them need not.

A generation whose next token cannot be drawn yet, since its grammar's mask is late, is held back: it has no row until
then, and the others go on without it. Its drafts are taken back.
"""
