"""How fast samples are made, beside speculators' client: on a stand-in with a long tail, and on vLLM."""
