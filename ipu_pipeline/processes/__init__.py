"""What a process shares with its machine: signals, and whoever asks what is running."""
