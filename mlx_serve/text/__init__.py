"""Token ids to text and back: chat template, stop strings, reasoning, tool calls. Knows no socket and no job."""
