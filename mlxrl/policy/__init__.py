"""The model: the only package that depends on adapters and on the internals of mlx-lm models."""
