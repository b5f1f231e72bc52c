"""Launchers: the only place that defines or reads flags."""
