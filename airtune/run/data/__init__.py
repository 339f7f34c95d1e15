"""What a model learns from: files of any kind to token ids, and what became of each row."""
