"""A client of OpenAI's API for the commands and the benchmarks. Standard library only."""
