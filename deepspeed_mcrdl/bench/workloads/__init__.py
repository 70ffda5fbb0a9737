"""What the training examples share: real text to train on, and a record of what a run cost."""
