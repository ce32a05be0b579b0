"""Time and memory of this package beside its peers. benchmarks/results/README.md says how each result is repeated."""
