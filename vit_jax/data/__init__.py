"""From stored images to batches on devices: sources, transforms, the order of examples, and their prefetching."""
