"""One server in several processes: rank 0 says what it does, and the others do it too."""
