"""Several GPUs of a host bring one model together: each sends its share of a group, and gathers the others' shares."""
