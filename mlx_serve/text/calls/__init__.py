"""Tool calls in models' answers: a description of each format, and readers that parse the text as it streams."""
