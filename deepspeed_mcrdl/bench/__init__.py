"""Benchmarks: every timed call's result is checked, and whatever is compared is measured in one run, in turns."""
