"""PopTorch's operations: functions for models, each also for plain torch.

Each is an operation of our library of torch's, with a lowering. A function that asks whether a model is
being captured could not stand in a branch or a loop's body, which torch traces by other means.
"""
