"""One server in several processes: rank 0 announces each action, and all ranks execute it."""
