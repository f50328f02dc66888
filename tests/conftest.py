"""What all tests need before anything imports mlx."""

import os

from mlx_serve import blas

# No test may look for a model on a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
blas.preload_openblas()
