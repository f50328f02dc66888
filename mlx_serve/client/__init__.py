"""What commands and benchmarks ask servers with: OpenAI's API from the client's side. Standard library only."""
