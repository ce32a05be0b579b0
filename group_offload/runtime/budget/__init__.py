"""How much memory passes take beside their weights, and for how long they compute."""
