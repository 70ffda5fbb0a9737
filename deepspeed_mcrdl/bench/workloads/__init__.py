"""What the training examples share: real text to train on, and a record of what a run cost."""

WARM_UP_STEPS = 3  # steps of a run that are not counted
