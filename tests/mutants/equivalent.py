"""Mutants that no test can notice, for they change nothing that matters: module, line as it was, change, and why."""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
