"""The integer program: how many layers a round each device computes, where, which devices stream, and which take part.

One program per number of rounds k. For each device m and kind of layer g it has layers on the CPU ``C[m,g]`` and on the
GPU ``G[m,g]`` (paper: k*w = C + G, k*n = G), some with their experts on the CPU. For each device it has the streamed
bytes and their read-ahead, which are continuous (``streaming.py``), and whether the device streams and uses its GPU at
all. ``z`` picks one ring order of one set of devices, so participation and order are decided together with the rest. A
layout says how C and G come about:

- ``even_layout``: w layers a round for each device, the tail takes the rest. Exact where all layers are alike;
  otherwise it does not know which layers a device gets, so its optimum is a lower bound. ``loose`` relaxes the rounds
  too and bounds every larger k.
- ``cut_layout``: the devices in one order, W layers a round; a staircase of binaries marks where each window begins, so
  the bytes of every window are exact.
- ``single_device_layout``: the head computes the model alone.

Times are in milliseconds and memory in units of the largest layer, to keep the numbers near one.
"""
