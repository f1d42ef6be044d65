"""Causal attention as a layer, and the implementations that compute it."""
