"""The door to llama.cpp: weights, caches, tokenizer, chat template, samplers and devices."""
