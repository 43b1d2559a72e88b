"""Checks and timing of the machine at hand: `doctor` before a run, `bench` of the parts of a run."""
