"""Episodes for remote agents: registered by a training loop, claimed and played by an agent."""
