"""PopTorch's operations: functions for models, each also for plain torch."""
