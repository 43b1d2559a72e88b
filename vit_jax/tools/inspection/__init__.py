"""The state of runs from their files, and a step of a run, repeated and analysed."""
