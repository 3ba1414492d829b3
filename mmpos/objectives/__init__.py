"""Training objectives about position: losses and small modules that run on any encoder and any encoding."""
