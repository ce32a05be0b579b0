"""Blobs packed without loss: fewer bytes for the drive, for RAM, for the link, and on the device."""
