"""Servers for the command line to look after: those of tests/serving."""

from tests.serving.conftest import host_state, make_spec

__all__ = ["host_state", "make_spec"]
