"""What all tests need before anything imports mlx."""

import os
import signal

from hypothesis import HealthCheck, settings

from mlx_serve import blas

# No test may look for a model on a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
blas.preload_openblas()

# Programs that tests start would inherit it: nohup ignores the first, and a shell the second for what it runs in the
# background.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no fault of the code: no test is judged by its time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
