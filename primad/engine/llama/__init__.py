"""llama.cpp as the implementation of the engine protocol. Only the engine imports llama_cpp.

To llama.cpp a window is a complete model, loaded from a metadata split and its layer files, with hidden states as input
(``llama_batch.embd``). What primad adds, and why:

* **Taking the hidden state out.** llama.cpp has no call for it. An evaluation callback is called for each node of the
  graph; at ``l_out-{last}`` the graph is computed up to there, the tensor copied and the graph stopped, so the
  placeholder norm and output matrix of a middle window never run. Calls for about 30 nodes a layer cost 0.7 us each in
  Python, 8 % of a small model's token. So the callback is a dict's own ``__getitem__``: known nodes are answered in C
  without running Python, and only an unknown node, or the wanted one, reaches ``__missing__``. While the graph stays
  the same and only its end is wanted, the callback is off (``quiet.py``).
* **The first hidden state** is looked up here, token by token, with ggml's own dequantisation: bit-identical to what
  llama.cpp computes from tokens, and without the logits buffer of the whole vocabulary that a first window would
  allocate.
* **Position embeddings** are added to those rows here; a window has one row of zeros for them.
* **Many hidden states also enter through the callback**, and any number where a graph does not take them unchanged. As
  ``llama_batch.embd`` they are copied four times, and two of the copies stay with the context: 8 MB for 256 tokens of
  width 4,096 and one window. So a large step is a batch of tokens 0, whose rows are overwritten where the graph has
  looked them up, and again where it has scaled them (Gemma). Per-layer inputs enter the same way (``layer_inputs.py``).
* **KV cells are read and restored** by position (``engine/kv_cache.py``).
* **The last window's matrix** is stored under the name of the token embedding (llama.cpp's tied-output fall-back), so
  that the embedding itself is not held twice.
"""
