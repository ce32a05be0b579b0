"""Blobs compressed without loss: fewer bytes for the disk, for RAM, for the link, and on the device."""
