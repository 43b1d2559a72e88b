"""Batches on devices from stored images: sources, transforms, order of examples, prefetching."""
