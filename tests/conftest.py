"""What all tests need before anything imports mlx."""

import os

from hypothesis import HealthCheck, settings

from mlx_serve import blas

# No test may look for a model on a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
blas.preload_openblas()

# A busy machine is no fault of the code: no test is judged by its time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
