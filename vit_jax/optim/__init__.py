"""What happens to a gradient before it changes a parameter: optimisers, schedules, freezing, and Polyak averages."""
