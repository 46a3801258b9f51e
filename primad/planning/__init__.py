"""What a plan would be and why, with no daemon, network or model weights: question in, explanation out.

``question`` reads what was asked, ``whatif`` changes it, ``explain`` answers it with values (``schema``), which ``table``
and ``plot`` show.
"""
