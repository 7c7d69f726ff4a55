"""Engines and the pool: plan.py decides which blocks, one thin file per engine moves them."""
