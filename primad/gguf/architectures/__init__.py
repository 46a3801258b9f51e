"""Which architectures can be cut into windows exactly, and the metadata that a window of one needs.

A window is loaded by llama.cpp's own graph for the architecture, as a model of fewer layers that is fed hidden states. That
is exact only where nothing in the graph depends on the layer's number, on the number of layers or on token ids, beyond
what the window's metadata can say again. So this table is closed: each entry was read in llama.cpp's ``src/models/*.cpp``
(the copy in llama-cpp-python 0.3.36) and its windows were compared with the whole model bit by bit
(``tests/shell/test_cut_exact.py``). A model of another architecture is refused, unless its header has an entry of its own
that ``primad/certify`` derived and compared (``Header.derived``). What the entries say:

- **Embedding.** The head turns tokens into hidden states itself. Gemma 3 scales token rows by sqrt(width) but not hidden
  states; Granite and MiniCPM scale both, so their ``embedding_scale`` is written as 0 (do not scale) in every window. Where
  a graph scales both without a key, refuses hidden states or wants more than one position for each, they go in where it has
  looked up tokens (``is_fed``), or where it has normed those (``entries``; RWKV 6 gives that node no name but its number in
  the graph). Positions that have an embedding of their own (GPT-2) are added by the head.
- **Sliding windows.** The pattern is written out and cut. llama.cpp asserts that a sliding-window model has a layer that
  slides: where the graph of the model without the key is the same one, a window without such a layer drops the key
  (``OPTIONAL``); where the graph always slides, its layers slide over more positions than a context has (``ALWAYS``).
  Cohere 2 rotates sliding layers only, so there an endless rope scaling makes every angle 0. Where layers that slide have
  other heads or angles, each window holds one of them (``NEEDED``), which says where a window may begin (``cut_multiple``).
- **Recurrent layers** remember a state instead of cells. llama.cpp aborts where a window of a hybrid has none of them, or
  no attention, so one stands behind its layers, of zeros, and is not computed (``stand_ins``); the tail holds both
  (``tail_layers``). Which layers of Qwen are recurrent is written out.
- **Inputs without use** make llama.cpp abort: a window needs a layer that rotates (``needs``), or that chooses what
  attention sees (``needs_indexer``). GLM 5.2's layers take over what one before them chose: windows begin at one that does.
- **Inputs of layers** beside the hidden state, which the graph makes of tokens (Gemma 4 E2B, E4B), go from the head along
  with hidden states (``layer_inputs``). Layers that use the KV cells of others are in one window with those: the last one
  (``shares_cells``, ``tail_layers``).
- **Layers for multi-token prediction** behind the others are in no window.
- **Defaults and shapes that llama.cpp derives from the number of layers** (``LLM_TYPE_*``, MiniCPM's residual scale,
  DeepSeek 2 "lite", Gemma 3 27B's attention scale, Command R+'s norms) are written out, or refused where no key exists.
"""
