"""Every model class that diffusers exports, with a tiny configuration: what of this package works with it."""
