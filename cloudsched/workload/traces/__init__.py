"""Replay of recorded jobs: Google 2011 v2, Alibaba GPU 2023, and SWF logs."""
