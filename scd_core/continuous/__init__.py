"""Continuous autoregression: MAR, which draws vectors with a diffusion head, and its speculative sampler."""
