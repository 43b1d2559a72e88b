"""Memory, time and cost of a run on hardware that need not be available.

The step of the run is compiled for that hardware.
"""
