"""Many sequences at once over one model: continuous batching, a step at a time."""
