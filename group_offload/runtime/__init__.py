"""How weights move through a module's passes: the engine of each module, its gates, and the rooms below them."""
