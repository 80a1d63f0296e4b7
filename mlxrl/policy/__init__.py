"""The model: the only place that knows adapters and the insides of mlx-lm models."""
