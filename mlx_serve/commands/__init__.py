"""The sub-commands: each has a module with ``main(argv) -> exit status``. None imports MLX into its own process."""
