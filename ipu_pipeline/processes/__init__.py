"""What a process shares with its machine: signals, other processes, and answers to what is running."""
