"""A conversation with a model: turns, its window on the context, commands, files."""
