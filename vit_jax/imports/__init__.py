"""Imports at run time: the user's code by reference, optional packages, the platform of JAX."""
