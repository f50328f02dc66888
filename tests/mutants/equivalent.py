"""Mutants that no test can notice, because they change nothing that matters. The key is module, line as it was, and change."""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
