"""What happens to one hidden state: recomputed layers, streamed experts, streamed loss. Torch only."""
