"""What is measured: scripts that write their numbers to benchmarks/results/."""
