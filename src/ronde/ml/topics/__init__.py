"""Latent Dirichlet allocation: the estimator, its two kinds of steps, and the coherence of topics."""
