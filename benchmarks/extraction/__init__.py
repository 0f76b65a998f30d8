"""How fast hidden states are made and how small, and what a draft loses by waves and by fp8."""
