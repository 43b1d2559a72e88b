"""Updates of parameters: optimisers, schedules, freezing, and Polyak averages."""
