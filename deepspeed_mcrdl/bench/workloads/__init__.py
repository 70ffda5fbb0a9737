"""What the training examples share, data and a record of what a run cost; and DLRM, which has no folder of its own."""

WARM_UP_STEPS = 3  # steps of a run that are not counted
