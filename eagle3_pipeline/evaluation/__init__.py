"""Does the draft help? Measured on the real server with held-out prompts, by the server's own counters."""
