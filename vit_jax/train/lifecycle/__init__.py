"""The beginning and the end of a run: its folder and lock, agreement of processes, signals, hangs."""
