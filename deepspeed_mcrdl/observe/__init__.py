"""What the runtime carried: how often, how much, how long."""
