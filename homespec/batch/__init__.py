"""Rows in, rows out: a file of requests answered overnight, with nothing lost."""
