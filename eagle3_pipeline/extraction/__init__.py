"""From samples to hidden states: layer ids, the vLLM connector, capture, checks, and the step itself."""
