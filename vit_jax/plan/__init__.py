"""What a run needs on hardware that is not at hand: memory, time and cost, from the very step compiled for it."""
