"""Training of the draft: its own process, packed batches, test-time training, resumable to the bit."""
