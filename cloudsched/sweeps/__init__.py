"""Many trainings and evaluations as Ray Tune trials; the sweeps themselves are in `tune/`."""
