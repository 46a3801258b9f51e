"""What a plan would be and why, without daemons, network or model weights: question in, explanation out.

``question`` reads what was asked, ``whatif`` changes it, and ``explain`` answers it with values (``schema``), which
``table`` and ``plot`` show.
"""
