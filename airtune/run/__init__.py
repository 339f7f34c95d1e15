"""Uses a built model: data, training, evaluation, tracking."""
