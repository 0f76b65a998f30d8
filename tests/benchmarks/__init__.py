"""Tests of the benchmarks: that their checks hold at a small size. No timings."""
