"""primad: one large language model across the machines you own."""

import os

__version__ = "0.1.0"

# numpy multiplies nothing large here, and starting the threads for it would take each process 75 ms of the processor.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
