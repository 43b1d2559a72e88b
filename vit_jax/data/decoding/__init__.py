"""Pixels from the bytes of image files."""
