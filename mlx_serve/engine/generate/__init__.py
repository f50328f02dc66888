"""Token ids out of a loaded model: prefill, the batch, sampling, grammars, scoring, embedding."""
