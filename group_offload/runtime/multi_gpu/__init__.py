"""Several GPUs of a host bring one model together: each sends its shard of a group, and gathers the others' shards."""
