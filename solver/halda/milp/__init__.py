"""The integer program: which device computes how many layers a round, on what, which stream, and who takes part.

One program for one number of rounds k. Per device m and kind of layer g it has layers on the CPU ``C[m,g]`` and on the GPU
``G[m,g]`` (paper: k*w = C + G, k*n = G), of some of which the experts are on the CPU. Per device it has the bytes that
stream and those that are read ahead of them, which are no whole numbers (``streaming.py``), and whether it streams and uses
its GPU at all; ``z`` picks one ring order of one set of devices, so who takes part and in which order is decided with the
rest. A layout says how C and G come about:

- ``even_layout``: w layers a round for each device, the tail takes the rest. Exact where all layers are alike; where
  they are not it does not know which layers a device gets, so its optimum is a lower bound. ``loose`` lets go of the
  rounds too and bounds every larger k.
- ``cut_layout``: the devices in one order, W layers a round; where each window begins is a staircase of binaries, so the
  bytes of every window are exact.
- ``single_device_layout``: the head computes the model alone.

Times are in milliseconds and memory in units of the largest layer, to keep the numbers near one.
"""
