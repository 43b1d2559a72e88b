"""Begin and end a run: its folder and lock, agreement of processes, signals, hangs."""
