"""``mlx-serve install-service``: writes service files for launchd and systemd."""
