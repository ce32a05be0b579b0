"""What weights and activations both stand on: devices, memory, files, what autograd saves, words for people."""
