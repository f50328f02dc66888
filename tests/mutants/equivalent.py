"""Mutants that live because they change nothing that anybody could see: module, the line as it was, change, and why."""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
