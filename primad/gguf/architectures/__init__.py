"""Which architectures can be cut into windows exactly, and the metadata that a window of one needs.

llama.cpp loads a window with its own graph for the architecture, as a model of fewer layers that is fed hidden states.
That is exact only if nothing in the graph depends on the layer's number, on the number of layers or on token ids,
beyond what the window's metadata can express. So this table is closed: each entry was read in llama.cpp's
``src/models/*.cpp`` (the copy in llama-cpp-python 0.3.36) and its windows were compared with the whole model bit by bit
(``tests/shell/test_cut_exact.py``). A model of another architecture is refused, unless its header has an entry of its
own that ``primad/certify`` derived and compared (``Header.derived``). What the entries say:

- **Embedding.** The head turns tokens into hidden states itself. Gemma 3 scales token rows by sqrt(width) but not hidden
  states; Granite and MiniCPM scale both, so their ``embedding_scale`` is written as 0 (do not scale) in every window. Where
  a graph scales both without a key, refuses hidden states or wants more than one position for each, they enter where it has
  looked up tokens (``is_fed``), or where it has normed those (``entries``; RWKV 6 gives that node no name but its number in
  the graph). Positions that have an embedding of their own (GPT-2) are added by the head.
- **Sliding windows.** The pattern is written out and cut. llama.cpp asserts that a sliding-window model has a layer that
  slides: where the graph of the model without the key is the same one, a window without such a layer drops the key
  (``OPTIONAL``); where the graph always slides, its layers slide over more positions than a context has (``ALWAYS``).
  Cohere 2 rotates only sliding layers, so there an endless RoPE scaling makes every angle 0. Where sliding layers have
  other heads or angles, each window holds one of them (``NEEDED``), which limits where a window may begin
  (``cut_multiple``).
- **Recurrent layers** keep a state instead of a KV cache. llama.cpp aborts where a window of a hybrid has none of them, or
  no attention, so a layer of zeros follows its layers and is not computed (``stand_ins``); the tail holds both
  (``tail_layers``). Which layers of Qwen are recurrent is written out.
- **Unused inputs** make llama.cpp abort: a window needs a layer that rotates (``needs``), or that chooses what attention
  sees (``needs_indexer``). GLM 5.2's layers reuse the choice of an earlier layer: windows begin at one that chooses.
- **Inputs of layers** in addition to the hidden state, which the graph makes of tokens (Gemma 4 E2B, E4B), are sent by the
  head along with hidden states (``layer_inputs``). Layers that use the KV cache of others are in one window with those: the
  last one (``shares_cells``, ``tail_layers``).
- **Layers for multi-token prediction** after the others are in no window.
- **Defaults and shapes that llama.cpp derives from the number of layers** (``LLM_TYPE_*``, MiniCPM's residual scale,
  DeepSeek 2 "lite", Gemma 3 27B's attention scale, Command R+'s norms) are written out, or refused where no key exists.
"""
