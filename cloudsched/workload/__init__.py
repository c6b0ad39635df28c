"""Where jobs come from: synthetic streams, sampled real marginals and replayed traces."""
