"""Training: what stands between a group of processes and a script that trains a model."""
