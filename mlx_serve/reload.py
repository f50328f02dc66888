"""SIGHUP: the running server reads its files again. Keys, certificates and models change, and no request notices.

Everything that is wrong is logged, and then nothing has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from threading import Lock, Thread

from mlx_serve.engine.catalog import Catalog, NotAModelError
from mlx_serve.serve import Running
from mlx_serve.settings import http
from mlx_serve.settings.config import Config
from mlx_serve.settings.flags import option_of
from mlx_serve.values import StartError

log = logging.getLogger("mlx_serve")

# What a reload changes. All else is given to threads and caches when the server starts.
_RENEWED = frozenset(
    {"api_key", "api_key_file", "tls_cert", "tls_key", "allowed_origins", "allowed_hosts", "model", "models", "alias"}
    | {"served_model_name", "adapter", "model_dir"}
)


class Reload:
    """Call it to reload, on a thread of its own. ``server`` is set once it runs.

    ``read`` reads the settings again, ``make_catalog`` makes the catalog that they describe; None: the models stay.
    """

    def __init__(
        self,
        settings: Config,
        catalog: Catalog,
        read: Callable[[], Config],
        make_catalog: Callable[[Config], Catalog] | None,
    ) -> None:
        self.server: Running | None = None
        self._settings = settings
        self._catalog = catalog
        self._read = read
        self._make_catalog = make_catalog
        self._lock = Lock()

    def __call__(self) -> None:
        """Reload. Returns at once: a repository may have to be downloaded."""
        Thread(target=self.run, name="reload", daemon=True).start()

    def run(self) -> None:
        """Reload on this thread."""
        with self._lock:
            if self.server is None:
                log.warning("SIGHUP: the server is still starting, and has just read its settings")
                return
            try:
                self._renew(self.server, self._read())
            except (StartError, NotAModelError, OSError) as error:
                log.warning("SIGHUP: nothing is changed: %s", error)

    def _renew(self, server: Running, now: Config) -> None:
        options = http.options(now)
        catalog = self._make_catalog(now) if self._make_catalog is not None else None
        server.http.renew(options.access, options.tls_cert, options.tls_key)
        moved = self._catalog.become(catalog) if catalog is not None else []
        log.info("SIGHUP: keys, certificates and models are read again: %d keys", len(options.access.api_keys))
        for name in moved:
            log.warning("SIGHUP: %s keeps its directory until the server starts again; a new name takes effect", name)
        changed = [
            each.name for each in fields(Config) if getattr(now, each.name) != getattr(self._settings, each.name)
        ]
        if later := [option_of(name) for name in changed if name not in _RENEWED]:
            log.warning("SIGHUP: the server must start again for %s", ", ".join(later))
