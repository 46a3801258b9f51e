"""llama.cpp behind the engine protocol. No room but the engine imports llama_cpp.

A window is a model of its own to llama.cpp, loaded from a metadata split and its layer files, fed with hidden states
(``llama_batch.embd``). What is ours, and why:

* **Taking the hidden state out.** llama.cpp has no call for it. An evaluation callback is asked about each node of the
  graph; at ``l_out-{last}`` the graph is computed up to there, the tensor copied and the graph stopped, so the stand-in
  norm and output matrix of a middle window never run. Being asked about some 30 nodes a layer costs 0.7 us each in
  Python, 8 % of a small model's token. So the callback is a dict's own ``__getitem__``: a node that was seen before is
  answered in C without running a line of Python, and only an unknown one, or the wanted one, reaches ``__missing__``.
  While the graph stays the same, and nothing but its end is wanted, llama.cpp asks nothing (``quiet.py``).
* **The first hidden state** is looked up here, row by row, with ggml's own dequantisation: bit for bit what llama.cpp
  computes from tokens, and without the logits buffer of the whole vocabulary that a first window would allocate.
* **Positions with an embedding of their own** are added to those rows here; in a window there is one row for them, of 0.
* **Many hidden states go in through the callback too**, and any where a graph does not take them as they come. As
  ``llama_batch.embd`` they are copied four times, and two of the copies stay with the context: of 256 rows of width 4,096
  those of one window are 8 MB. So a large step is a batch of tokens 0, whose rows are overwritten where the graph has looked
  them up, and again where it has scaled them (Gemma). What layers take beside hidden states comes the same way
  (``layer_inputs.py``).
* **KV cells leave and return** by position (``engine/kv_cache.py``).
* **The last window's matrix** is stored under the name of the token embedding (llama.cpp's tied-output fall-back), so
  that the embedding itself need not be held twice.
"""
