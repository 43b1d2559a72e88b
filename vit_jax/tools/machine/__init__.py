"""Checks and timing of this machine: `doctor` before a run, `bench` of the parts of a run."""
