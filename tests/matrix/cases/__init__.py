"""Each exported model class, tiny: what it is built from, and what one forward takes."""
