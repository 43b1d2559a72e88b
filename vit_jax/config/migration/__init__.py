"""Conversion of configs of other systems.

A recipe returns them as an `ml_collections.ConfigDict`; `convert` chooses the module of the system.
"""
