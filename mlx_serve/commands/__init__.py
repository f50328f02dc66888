"""The sub-commands: one module each, with ``main(argv) -> exit status``. None of them imports MLX into its process."""
