"""``mlx-serve install-service``: files for launchd and systemd."""
