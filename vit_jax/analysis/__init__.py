"""Pictures of a model and of runs, each with the numbers that it is drawn from."""
