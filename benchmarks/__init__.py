"""Time and memory of this package beside its peers. docs/benchmarks.md says how each table is repeated."""
