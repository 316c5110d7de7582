"""Superposition self-distillation: one language model, several texts at once."""
