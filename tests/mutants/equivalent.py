"""Mutants that no test can notice, for they change nothing that matters: module, line as it was, change, and why."""

_PREFIXES = "mlx_serve/engine/cache/prefixes.py"
_THRESHOLD = "A threshold of what is worth the work: with a token more the answers are the same."
_SAMPLING = "mlx_serve/engine/generate/sampling.py"
_GREEDY = "if sampling.temperature < _GREEDY_BELOW or sampling.top_p < _GREEDY_TOP_P:"
_AT_THE_BOUND = "At the bound itself the filters leave the likeliest token too."

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (_PREFIXES, "MIN_TOKENS = 16", "16 -> 17"): _THRESHOLD,
    (_PREFIXES, "_MIN_FROM_DISK = 128", "128 -> 129"): _THRESHOLD,
    (_SAMPLING, _GREEDY, "sampling.top_p < _GREEDY_TOP_P -> sampling.top_p <= _GREEDY_TOP_P"): _AT_THE_BOUND,
    (
        _SAMPLING,
        _GREEDY,
        "sampling.temperature < _GREEDY_BELOW -> sampling.temperature <= _GREEDY_BELOW",
    ): _AT_THE_BOUND,
}
