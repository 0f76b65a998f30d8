"""Training: speed, memory and quality of this project's loop, beside speculators' own."""
