"""Which job runs when: the queue, admission, deadlines, and the one thread that steps all models."""
