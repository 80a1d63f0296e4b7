"""From tasks to trajectories; knows no algorithm."""
