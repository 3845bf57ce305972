"""The OpenAI API over HTTP, on a scheduler of many sequences."""
