"""Generation: prompts to samples, by asking the target's own server."""
