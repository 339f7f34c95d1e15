"""What happens to one hidden state: recomputed layers, a streamed loss. Torch only."""
