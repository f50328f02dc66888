"""The sub-commands. None imports MLX into its own process.

Each is a module with ``main(argv) -> exit status`` and ``parser()``, imported when it is called.
"""

from __future__ import annotations

COMMANDS: dict[str, str] = {
    "bench": "mlx_serve.commands.bench.command",
    "chat": "mlx_serve.commands.chat",
    "completion": "mlx_serve.commands.completion",
    "doctor": "mlx_serve.commands.doctor.command",
    "install-service": "mlx_serve.commands.service.command",
    "models": "mlx_serve.commands.models",
    "ps": "mlx_serve.commands.ps",
    "pull": "mlx_serve.commands.pull",
    "selftest": "mlx_serve.commands.selftest.command",
    "stop": "mlx_serve.commands.stop",
}
# With "serve", or with none of these, ``mlx-serve`` starts the server.
WORDS = sorted([*COMMANDS, "help", "serve", "version"])
# These also take the server's flags.
WITH_SERVER_FLAGS = frozenset({"doctor", "models", "selftest", "serve"})


def server_flags(argv: list[str]) -> list[str]:
    """The server's flags. A model may come first, with or without "serve", as for ``vllm serve MODEL``."""
    if argv == ["version"]:
        return ["--version"]
    argv = argv[argv[:1] == ["serve"] :]
    return ["--model", *argv] if argv and not argv[0].startswith("-") else argv
