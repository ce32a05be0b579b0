"""How bytes move: slots on the device, copies into them, and the hooks that start both."""
